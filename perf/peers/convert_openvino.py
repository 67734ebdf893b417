"""Turns a Hugging Face checkpoint into OpenVINO's form, bfloat16 as it is: `convert_openvino.py CHECKPOINT OUT`.

Runs in the environment of the engine openvino; reads local files only.
"""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export

if __name__ == "__main__":
    task = "text-generation-with-past"
    main_export(sys.argv[1], sys.argv[2], task=task, convert_tokenizer=True, local_files_only=True)
