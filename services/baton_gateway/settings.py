"""Settings of the gateway, read from environment variables `BATON_…` or flags of `baton gateway`."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from baton_common.peer_settings import PeerSettings

from .models.models_file import ModelsFileError, ModelSpec, PoolSpec, SpecialTokensPolicy, check_addresses, read_models
from .reasoning.formats import ReasoningFormat
from .routing.policies import PolicyName
from .tools.tool_formats import ToolFormat

CommaSeparated = Annotated[list[str], NoDecode]


class GatewaySettings(PeerSettings):
    """The OpenAI-compatible HTTP front of a set of decode and prefill pods."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        extra="ignore",
    )

    model: Path | None = None
    """Hugging Face folder of the model: tokenizer, chat template, config.json and generation_config.json. Or its id on
    a hub: owner/name, or owner/name@revision."""
    served_model_name: str = ""
    """Model name that clients use in requests. Empty: the name of the model folder, or owner/name."""
    decode_addresses: CommaSeparated = Field(default_factory=list)
    """Decode pods, as host:port separated by commas. At least one."""
    prefill_addresses: CommaSeparated = Field(default_factory=list)
    """Prefill pods, as host:port separated by commas. Empty: decode pods prefill for themselves."""
    models_file: Path | None = None
    """YAML or JSON file with several models, each with its pools of pods. It replaces the settings that describe one
    model: model, served_model_name, decode_addresses, prefill_addresses, chat_template, tool_call_parser,
    reasoning_parser and use_generation_config."""
    namespace: str = ""
    """Kubernetes namespace of the pods that selectors in the models file find. Empty: the gateway's own."""
    canary_configmaps: str = ""
    """Prefix of the names of the Kubernetes ConfigMaps, in `namespace`, with the share of a model's sessions
    that another revision gets: PREFIX-values from Helm values, PREFIX-status from the controller, PREFIX-override set
    by hand. An override wins over the controller, and the controller over Helm values."""
    canary_file: Path | None = None
    """JSON file with the canary of each model, in place of canary_configmaps; read again when it changes."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    admin_host: str = ""
    """Address of the admin port. Empty: the same as host."""
    admin_port: int = Field(default=9400, ge=0, le=65535)
    """Port for operators: /metrics, /pods and the probes /live and /ready. 0: any free one."""
    tls_cert_file: Path | None = None
    """PEM file with a certificate and its chain, to serve TLS without a proxy; read again when it changes."""
    tls_key_file: Path | None = None
    """PEM file with the certificate's private key."""
    api_keys: Annotated[list[SecretStr], NoDecode] = Field(default_factory=list)
    """API keys separated by commas. If any are given, every /v1 route requires a key."""
    tenants_file: Path | None = None
    """YAML or JSON file, or mounted Secret, with tenants, their limits and their keys; read again when it changes."""
    redis_url: SecretStr | None = None
    """URL of the Redis in which several gateways share the use of limits, and the keys that `baton keys` creates."""
    redis_lost: Literal["local", "refuse"] = "local"
    """While Redis cannot be reached: local: each gateway counts limits by itself; refuse: requests are refused."""
    chat_template: Path | None = None
    """File with a Jinja chat template, in place of the model's own."""
    tool_call_parser: ToolFormat = "auto"
    """Format in which the model writes tool calls; auto: found in its chat template."""
    reasoning_parser: ReasoningFormat = "auto"
    """Format in which the model writes its thoughts, which clients get apart from its answer; auto: found in its chat
    template."""
    special_tokens_in_content: SpecialTokensPolicy = "text"
    """For messages and tools that contain the text of a special token, such as <|im_start|>: take it as plain text,
    turn it into the token as transformers does, which lets clients forge turns, or reject the request. In prompts of
    /v1/completions it always becomes the token."""
    use_generation_config: bool = True
    """Use the sampling defaults (temperature, top_p, …) of the model's generation_config.json."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, gt=0)
    """Largest request body in bytes."""
    max_prompts: int = Field(default=256, gt=0)
    """Most prompts in one completions request."""
    max_sequences_per_request: int = Field(default=256, gt=0, le=4096)
    """Most sequences that one request may generate: its prompts times its choices (`n`, or `best_of`)."""
    max_grammar_chars: int = Field(default=65_536, gt=0, le=65_536)
    """Longest JSON schema, regular expression, grammar or list of choices that an answer must follow, in characters."""
    max_schema_depth: int = Field(default=64, gt=0)
    """Most levels of nesting in a JSON schema."""
    max_unread_tokens: int = Field(default=16_384, gt=0)
    """Tokens of a stream that a client may leave unread before its request is cancelled."""
    ttft_slo_s: float = Field(default=30, gt=0)
    """Seconds within which a request should get its first token. A request that is predicted to take longer is
    refused at once, with a Retry-After header."""
    pod_queue_s: float = Field(default=0.5, ge=0)
    """A pod gets another request only while it has at most this many seconds of prefill queued. Other requests wait
    in the gateway, where tenants take turns by their weights."""
    queue_timeout_s: float = Field(default=60, gt=0)
    """Seconds that a request may wait in the gateway's queue."""
    pod_wait_s: float = Field(default=5, ge=0)
    """Seconds that a request may wait for a decode pod while none is live but one was within the last 30 seconds, as
    when the last pod is replaced. 0: such a request is refused at once."""
    max_waiting_requests: int = Field(default=1024, ge=0)
    """Most requests in the gateway's queue. When it is full, the tenant with the most requests in it, for its
    weight, loses its newest request."""
    request_timeout_s: float = Field(default=3600, gt=0)
    """Seconds that a request may take in total."""
    max_lost_pods: int = Field(default=5, ge=0)
    """Decode pods that a request may lose before it fails, since the request itself may be crashing them."""
    resume_timeout_s: float = Field(default=30, ge=0)
    """Seconds that a request whose decode pod was lost may wait for another one."""
    first_token_timeout_s: float = Field(default=60, gt=0)
    """Seconds without a first token after which a request moves to another decode pod. Three times the predicted
    prefill time is added. Without another pod the request stays."""
    inter_token_timeout_s: float = Field(default=60, gt=0)
    """Seconds without a next token after which a request moves to another decode pod. Three times the predicted time to
    compute its prompt and tokens again is added. Without another pod the request stays."""
    retry_share: float = Field(default=0.2, ge=0, le=1)
    """Most retries of this gateway, as a share of the prompts of the last ten seconds. Prompts that a pod refused
    and requests that leave a pod after a timeout count as retries. Requests that continue after the loss of a pod do
    not."""
    retries_per_s: float = Field(default=10, ge=0)
    """Retries per second that are allowed in addition to retry_share."""
    head_timeout_s: float = Field(default=15, gt=0)
    """Seconds a client may take for a TLS handshake, and to send a request's headers."""
    body_timeout_s: float = Field(default=30, gt=0)
    """Seconds a client may take to send a request's body."""
    keepalive_s: float = Field(default=15, gt=0)
    """Seconds without a token after which a stream sends a comment line, so that no proxy closes it."""
    worker_timeout_s: float = Field(default=5, gt=0)
    """Seconds without a report after which a pod counts as lost."""
    routing_policy: PolicyName = "kv_aware"
    """How pods are chosen. kv_aware: by predicted time to first token, given their cached prefixes. The other policies
    ignore caches."""
    local_prefill: bool = True
    """Let a decode pod prefill a prompt itself if a hand-over is predicted to take longer. This needs kv_aware and pods
    that have measured their prefill rate."""
    stay_margin: float = Field(default=0.5, ge=0)
    """A prompt stays on a pod that has most of it cached, unless this is predicted to take longer than on the best
    pod by more than this share."""
    kv_transfer_rate: float = Field(default=2e9, gt=0)
    """Assumed bytes of KV per second from a prefill to a decode pod, until the decode pod has reported hand-over
    times."""
    prefix_index_entries: int = Field(default=4_000_000, gt=0)
    """Most cached blocks, over all pods of a pool, that the gateway tracks; each takes about 200 bytes."""
    require_cache_scopes: bool = False
    """Do not use worker pods of an older version that shares its prefix cache among all tenants. Off: such pods serve
    requests until the rollout has replaced them."""
    session_header: str = "x-session-id"
    """Request header with the session of a request. The session, or else `user`, decides among equally good pods."""
    drain_delay_s: float = Field(default=0, ge=0)
    """Seconds for which requests are still served after SIGTERM, while the gateway is no longer ready; each answer then
    closes its connection. Set it to the time for which a load balancer may still send new connections."""
    shutdown_grace_s: int = Field(default=60, ge=0)
    """Seconds that running requests get to finish after drain_delay_s, while new ones are refused."""
    tokenizer_threads: int = Field(default=2, gt=0)
    """Threads that parse large bodies, render long conversations and tokenize long texts. Tenants take turns in using
    them."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector that receives traces, and metrics by OpenTelemetry's conventions for generative AI, over
    gRPC: http://host:4317. Empty: none."""
    trace_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that are traced. For a request with a traceparent header, that header decides."""
    docs: bool = False
    """Serve the API description at /docs, /redoc and /openapi.json, without a key."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    @field_validator("decode_addresses", "prefill_addresses", "api_keys", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return [item for item in (part.strip() for part in value.split(",")) if item]
        return value

    @field_validator("decode_addresses", "prefill_addresses")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        check_addresses(value)
        return list(dict.fromkeys(value))

    @field_validator("api_keys")
    @classmethod
    def _keys(cls, value: list[SecretStr]) -> list[SecretStr]:
        if any(not key.get_secret_value() for key in value):
            raise ValueError("a key is empty")
        return value

    @model_validator(mode="after")
    def _complete(self) -> "GatewaySettings":
        if self.models_file is not None:
            if self.model is not None or self.decode_addresses or self.prefill_addresses:
                raise ValueError("models_file: the file defines all models and pods; give no others")
        elif self.model is None:
            raise ValueError("model: a model is needed, or a models_file")
        elif not self.decode_addresses:
            raise ValueError("decode_addresses: at least one decode pod is needed")
        if self.canary_file is not None and self.canary_configmaps:
            raise ValueError("canary_file: give either this or canary_configmaps")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file: give both or none")
        return self

    def model_specs(self) -> tuple[ModelSpec, ...]:
        """Return the models to serve. Raises ModelsFileError, also when a model's folder is missing."""
        if self.models_file is not None:
            return tuple(
                msgspec.structs.replace(
                    spec, special_tokens_in_content=spec.special_tokens_in_content or self.special_tokens_in_content
                )
                for spec in read_models(self.models_file)
            )
        assert self.model is not None
        if not self.model.is_dir():
            raise ModelsFileError(f"model: {self.model} is not a folder")
        pool = PoolSpec(decode=tuple(self.decode_addresses), prefill=tuple(self.prefill_addresses))
        name = self.served_model_name or self.model.resolve().name
        return (
            ModelSpec(
                name=name,
                folder=self.model,
                chat_template=self.chat_template,
                tool_call_parser=self.tool_call_parser,
                reasoning_parser=self.reasoning_parser,
                special_tokens_in_content=self.special_tokens_in_content,
                use_generation_config=self.use_generation_config,
                pools=(pool,),
            ),
        )
