"""vnext: an LLM inference and serving engine built as one replicated state machine."""
