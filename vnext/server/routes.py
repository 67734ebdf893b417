"""Routes: every path of the server, its view, and its line on the welcome page.

The one table of paths: the application, GET / and GET /docs follow from it.
"""

from __future__ import annotations

from vnext.server.context.openai_types import ChatBody, CompletionBody
from vnext.server.messages.bodies import CountTokensBody, MessagesBody
from vnext.server.ollama.translation import (
    NamedBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from vnext.server.responses.bodies import ResponsesBody
from vnext.server.views.batches import (
    BatchBody,
    cancel_batch,
    create_batch,
    create_file,
    delete_file,
    get_batch,
    get_file,
    get_file_content,
    list_batches,
    list_files,
)
from vnext.server.views.chat import create_chat_completion
from vnext.server.views.completions import create_completion
from vnext.server.views.embeddings import EmbeddingBody, RerankBody, ScoreBody, create_embeddings, rerank, score
from vnext.server.views.log_view import list_segments, read_segment, stream_events
from vnext.server.views.messages import count_tokens, create_message
from vnext.server.views.ollama import (
    ollama_chat,
    ollama_embed,
    ollama_embeddings,
    ollama_generate,
    ollama_show,
    ollama_tags,
    ollama_version,
)
from vnext.server.views.operations import (
    HandoverBody,
    LoadAdapterBody,
    UnloadAdapterBody,
    get_health,
    get_load,
    get_metrics,
    get_model,
    get_server_info,
    hand_over,
    list_models,
    load_adapter,
    start_profile,
    stop_profile,
    unload_adapter,
)
from vnext.server.views.responses import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from vnext.server.views.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from vnext.server.views.transcriptions import transcribe, translate
from vnext.server.views.weights import (
    CallBody,
    FinishBody,
    StartBody,
    UpdateBody,
    collective_rpc,
    finish_weight_update,
    is_paused,
    is_sleeping,
    pause,
    reset_prefix_cache,
    resume,
    sleep,
    start_weight_update,
    update_weights,
    wake_up,
)
from vnext.server.views.welcome import (
    BYTES,
    EVENTS,
    HTML,
    JSON,
    NDJSON,
    TEXT,
    Route,
    get_docs,
    get_live,
    get_openapi,
    get_page_file,
    get_version,
    get_welcome,
)

ROUTES = (
    Route(
        "POST", "/v1/chat/completions", create_chat_completion, "continues a conversation, whole or as a stream", ChatBody,
        (JSON, EVENTS),
    ),
    Route("POST", "/v1/completions", create_completion, "continues a text, or several", CompletionBody, (JSON, EVENTS)),
    Route("POST", "/v1/embeddings", create_embeddings, "vectors of texts", EmbeddingBody),
    Route("POST", "/v1/audio/transcriptions", transcribe, "what a sound says", answers=(JSON, TEXT)),
    Route("POST", "/v1/audio/translations", translate, "what a sound says, in English", answers=(JSON, TEXT)),
    Route("POST", "/rerank", rerank, "sorts documents by their likeness to a query; also /v1/rerank, /v2/rerank", RerankBody),
    Route("POST", "/v1/rerank", rerank, "(as /rerank)", RerankBody),
    Route("POST", "/v2/rerank", rerank, "(as /rerank)", RerankBody),
    Route("POST", "/score", score, "how alike two texts are; also /v1/score", ScoreBody),
    Route("POST", "/v1/score", score, "(as /score)", ScoreBody),
    Route("POST", "/v1/messages", create_message, "continues a conversation, in Anthropic's API", MessagesBody, (JSON, EVENTS)),
    Route("POST", "/v1/messages/count_tokens", count_tokens, "the size of such a conversation", CountTokensBody),
    Route(
        "POST", "/v1/responses", create_response, "continues a conversation, in OpenAI's Responses API", ResponsesBody,
        (JSON, EVENTS),
    ),
    Route("POST", "/v1/responses/input_tokens", count_input_tokens, "the size of such a conversation", ResponsesBody),
    Route("GET", "/v1/responses/{response_id:(?!input_tokens$)[^/]+}", get_response, "a stored response"),
    Route("DELETE", "/v1/responses/{response_id:(?!input_tokens$)[^/]+}", delete_response, "(forgets a stored response)"),
    Route("GET", "/v1/responses/{response_id:(?!input_tokens$)[^/]+}/input_items", list_input_items, "(what it answers)"),
    Route("POST", "/v1/responses/{response_id:(?!input_tokens$)[^/]+}/cancel", cancel_response, "(ends one in the background)"),
    Route("GET", "/v1/models", list_models, "names what is served; /v1/models/NAME one of them"),
    Route("GET", "/v1/models/{model:.+}", get_model, "(one of those served)"),
    Route("POST", "/v1/load_lora_adapter", load_adapter, "serves a LoRA adapter (with --enable-lora)", LoadAdapterBody),
    Route("POST", "/v1/unload_lora_adapter", unload_adapter, "serves it no longer", UnloadAdapterBody),
    Route("POST", "/v1/files", create_file, "keeps a file of requests (with --batch-dir)"),
    Route("GET", "/v1/files", list_files, "lists the files"),
    Route("GET", "/v1/files/{file_id}", get_file, "(a file's name and size)"),
    Route("DELETE", "/v1/files/{file_id}", delete_file, "(forgets a file)"),
    Route("GET", "/v1/files/{file_id}/content", get_file_content, "(a file's bytes)", answers=(BYTES,)),
    Route("POST", "/v1/batches", create_batch, "answers a file's requests in the background", BatchBody),
    Route("GET", "/v1/batches", list_batches, "lists the batches"),
    Route("GET", "/v1/batches/{batch_id}", get_batch, "(how far a batch is)"),
    Route("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "(ends a batch)"),
    Route("POST", "/api/chat", ollama_chat, "continues a conversation, in Ollama's API", OllamaChatBody, (NDJSON, JSON)),
    Route("POST", "/api/generate", ollama_generate, "continues a prompt, in Ollama's API", OllamaGenerateBody, (NDJSON, JSON)),
    Route("POST", "/api/embed", ollama_embed, "vectors of texts, in Ollama's API; also /api/embeddings", OllamaEmbedBody),
    Route("POST", "/api/embeddings", ollama_embeddings, "(as /api/embed, of one text)", OllamaEmbeddingsBody),
    Route("POST", "/api/show", ollama_show, "what a model can, in Ollama's API", NamedBody),
    Route("GET", "/api/tags", ollama_tags, "names what is served, in Ollama's API; also /api/ps"),
    Route("GET", "/api/ps", ollama_tags, "(as /api/tags)"),
    Route("GET", "/api/version", ollama_version, "(the version, in Ollama's API)"),
    Route("POST", "/tokenize", tokenize, "the tokens of a text or a conversation", TokenizeBody),
    Route("POST", "/detokenize", detokenize, "the text of tokens", DetokenizeBody),
    Route("POST", "/handover", hand_over, "computes for another server (with --role prefill or encode)", HandoverBody),
    Route("GET", "/health", get_health, "200 while requests are served, else 503; also /ping"),
    Route("GET", "/ping", get_health, "(as /health)"),
    Route("POST", "/ping", get_health, "(as /health)"),
    Route("GET", "/live", get_live, "200 while this process runs"),
    Route("GET", "/metrics", get_metrics, "figures in Prometheus' form", answers=(TEXT,)),
    Route("GET", "/load", get_load, "how many answers wait or run"),
    Route("GET", "/version", get_version, "the version"),
    Route("GET", "/server_info", get_server_info, "version, settings of the engine and its environment"),
    Route("POST", "/update_weights", update_weights, "computes with other weights (with --enable-rl-routes)", UpdateBody),
    Route("POST", "/start_weight_update", start_weight_update, "begins an update that is sent in pieces", StartBody),
    Route("POST", "/finish_weight_update", finish_weight_update, "computes with the pieces that were sent", FinishBody),
    Route("POST", "/pause", pause, "lets nothing begin (with --enable-rl-routes)"),
    Route("POST", "/resume", resume, "goes on"),
    Route("GET", "/is_paused", is_paused, "whether it is paused, and the version of the weights"),
    Route("POST", "/sleep", sleep, "gives the memory of weights and cache back (with --enable-rl-routes)"),
    Route("POST", "/wake_up", wake_up, "takes it again"),
    Route("GET", "/is_sleeping", is_sleeping, "whether it sleeps, and the ranks' resident bytes"),
    Route("POST", "/reset_prefix_cache", reset_prefix_cache, "forgets what the cache holds (with --enable-rl-routes)"),
    Route("POST", "/collective_rpc", collective_rpc, "calls a registered function on every rank", CallBody),
    Route("GET", "/log", list_segments, "the log as it grows, with --show-log: vnext-replay ui --live reads it"),
    Route("GET", r"/log/{segment:\d{1,9}}", read_segment, "(a segment of the log, from an offset on)", answers=(BYTES,)),
    Route("POST", "/start_profile", start_profile, "notes the kernels' calls from now on (with --show-log)"),
    Route("POST", "/stop_profile", stop_profile, "draws them within the log's timeline, in a file beside it"),
    Route("GET", "/events", stream_events, "the engine's events, with --show-events: vnext router follows them", answers=(BYTES,)),
    Route("GET", "/", get_welcome, "for a browser a chat and the engine as it runs, else this list", answers=(TEXT, HTML)),
    Route("GET", "/page/{name}", get_page_file, "(a file of the page)", answers=(HTML,)),
    Route("GET", "/docs", get_docs, "this list with the fields of bodies", answers=(HTML,)),
    Route("GET", "/openapi.json", get_openapi, "these paths and bodies as an OpenAPI document"),
)
