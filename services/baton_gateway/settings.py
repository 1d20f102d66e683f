"""Settings of the gateway: environment variables `BATON_…`, or flags of `baton gateway`."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from baton_common.peer_settings import PeerSettings

from .models.models_file import ModelSpec, PoolSpec, SpecialTokensPolicy, check_addresses, read_models
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
    """Hugging Face folder of the model: tokenizer, chat template, config.json and generation_config.json."""
    served_model_name: str = ""
    """Name clients use for the model. Empty: the name of the model folder."""
    decode_addresses: CommaSeparated = Field(default_factory=list)
    """Decode pods, as host:port separated by commas. At least one."""
    prefill_addresses: CommaSeparated = Field(default_factory=list)
    """Prefill pods, as host:port separated by commas. Empty: decode pods prefill for themselves."""
    models_file: Path | None = None
    """YAML or JSON file with several models, each with its pools of pods, in place of the settings above."""
    namespace: str = ""
    """Kubernetes namespace of the pods that selectors in the models file find. Empty: the gateway's own."""
    canary_configmaps: str = ""
    """What the names of the Kubernetes ConfigMaps of that namespace begin with that say which share of a model's
    sessions another revision gets: PREFIX-values by Helm values, PREFIX-status by the controller, PREFIX-override by
    hand. The later ones come before the earlier ones."""
    canary_file: Path | None = None
    """JSON file with the share by model, in place of them; read again when it changes."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""
    admin_host: str = ""
    """Address of the admin port. Empty: the same."""
    admin_port: int = Field(default=9400, ge=0, le=65535)
    """Port for operators: /metrics, /pods and the probes /live and /ready. 0: any free one."""
    tls_cert_file: Path | None = None
    """PEM file with a certificate and its chain, to speak TLS without a proxy in front; read again when it changes."""
    tls_key_file: Path | None = None
    """PEM file with its private key."""
    api_keys: Annotated[list[SecretStr], NoDecode] = Field(default_factory=list)
    """Keys separated by commas; when there are any, every /v1 route asks for one of them."""
    tenants_file: Path | None = None
    """YAML or JSON file, or mounted Secret, with tenants, their limits and their keys; read again when it changes."""
    redis_url: SecretStr | None = None
    """Redis in which several gateways count limits together and find keys that `baton keys` put there."""
    redis_lost: Literal["local", "refuse"] = "local"
    """While Redis cannot be reached: count limits in each gateway alone, or refuse requests."""
    chat_template: Path | None = None
    """File with a Jinja chat template, in place of the model's own."""
    tool_call_parser: ToolFormat = "auto"
    """How the model writes calls of functions where a request lets it choose to; auto: as its chat template does."""
    special_tokens_in_content: SpecialTokensPolicy = "text"
    """Messages and tools that spell a special token, such as <|im_start|>: take it as plain text, turn it into the
    token as transformers does, which lets clients forge turns, or reject the request. Prompts of /v1/completions always
    turn it into the token."""
    use_generation_config: bool = True
    """Take sampling defaults (temperature, top_p, …) from the model's generation_config.json."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, gt=0)
    """Largest request body in bytes."""
    max_prompts: int = Field(default=256, gt=0)
    """Most prompts in one completions request."""
    max_sequences_per_request: int = Field(default=256, gt=0, le=4096)
    """Most sequences that one request may have generated: its prompts times its choices (`n`, or `best_of`)."""
    max_grammar_chars: int = Field(default=65_536, gt=0, le=65_536)
    """Longest JSON schema, regular expression, grammar or list of choices that an answer must follow, in characters."""
    max_schema_depth: int = Field(default=64, gt=0)
    """Levels of nesting that a JSON schema may have."""
    max_unread_tokens: int = Field(default=16_384, gt=0)
    """Tokens a client may leave unread before its request is cancelled."""
    ttft_slo_s: float = Field(default=30, gt=0)
    """Seconds within which a request should have its first token: one that is predicted to wait for longer is refused
    at once, with the time after which to try again."""
    pod_queue_s: float = Field(default=0.5, ge=0)
    """Seconds of prefill that a pod may have queued when it gets another request; until then requests wait in the
    gateway, where tenants take turns by their weights."""
    queue_timeout_s: float = Field(default=60, gt=0)
    """Seconds a request may wait there."""
    max_waiting_requests: int = Field(default=1024, ge=0)
    """Requests that may wait there; beyond, the tenant with the most to do there loses its newest."""
    request_timeout_s: float = Field(default=3600, gt=0)
    """Seconds a request may take in all."""
    max_lost_pods: int = Field(default=5, ge=0)
    """Decode pods that may be lost under a request before it fails: it may be what kills them."""
    resume_timeout_s: float = Field(default=30, ge=0)
    """Seconds that a request whose decode pod was lost waits for another one when none is live."""
    first_token_timeout_s: float = Field(default=60, gt=0)
    """Seconds after which a request without a first token leaves its decode pod for another, on top of three times what
    computing its prompt should take there. Without another pod it stays."""
    inter_token_timeout_s: float = Field(default=60, gt=0)
    """Seconds between two tokens of a choice after which it likewise goes on elsewhere, on top of three times what
    computing prompt and tokens again should take there."""
    retry_share: float = Field(default=0.2, ge=0, le=1)
    """Retries that this gateway may send, as a share of the prompts of the last ten seconds: of prompts that a pod
    refused, and of requests that leave a pod by a timeout. What goes on after the loss of a pod does not count."""
    retries_per_s: float = Field(default=10, ge=0)
    """Such retries a second that it may send in any case."""
    head_timeout_s: float = Field(default=15, gt=0)
    """Seconds a client may take to send a request's headers."""
    body_timeout_s: float = Field(default=30, gt=0)
    """Seconds a client may take to send a request's body."""
    keepalive_s: float = Field(default=15, gt=0)
    """Seconds of silence after which a stream gets a comment line, so that no proxy closes it."""
    worker_timeout_s: float = Field(default=5, gt=0)
    """Seconds without a report after which a pod counts as lost."""
    routing_policy: PolicyName = "kv_aware"
    """How pods are chosen: by predicted time to first token with what they have cached, or without looking at that."""
    local_prefill: bool = True
    """Let a decode pod prefill where a hand-over is predicted to take longer. Only with kv_aware, and only where pods
    have measured their prefill rate."""
    stay_margin: float = Field(default=0.5, ge=0)
    """A prompt stays on a pod that has most of it cached unless that is predicted to take longer than elsewhere by more
    than this share."""
    kv_transfer_rate: float = Field(default=2e9, gt=0)
    """Bytes of KV a second from a prefill to a decode pod, as predicted until that has reported how long it takes."""
    prefix_index_entries: int = Field(default=4_000_000, gt=0)
    """Most cached blocks, over all pods of a pool, that the gateway keeps track of; each takes about 200 bytes."""
    require_cache_scopes: bool = False
    """Use no worker pod of a version that shares its prefix cache among all tenants. Off: while pods of such a version
    are being replaced, they serve requests as they did before."""
    session_header: str = "x-session-id"
    """Request header that names the session of a request; equally good pods are told apart by it, or else by `user`."""
    drain_delay_s: float = Field(default=0, ge=0)
    """Seconds after SIGTERM, when readiness falls, for which requests are still served; each answer then closes its
    connection. Behind a load balancer: as long as that may go on sending connections here."""
    shutdown_grace_s: int = Field(default=60, ge=0)
    """Seconds running requests get to finish after that, while new ones are refused."""
    tokenizer_threads: int = Field(default=2, gt=0)
    """Threads that read large bodies, render long conversations and tokenize long texts. Tenants take turns for
    them."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector that gets traces and the metrics of its conventions for generative AI, over gRPC:
    http://host:4317. Empty: none."""
    trace_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that are traced; one that comes with a traceparent goes by that."""
    docs: bool = False
    """Serve a description of the API at /docs, /redoc and /openapi.json, to everybody."""
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
                raise ValueError("models_file: it says all of models and pods; give no others")
        elif self.model is None:
            raise ValueError("model: a model is needed, or a models_file")
        elif not self.model.is_dir():
            raise ValueError(f"model: {self.model} is not a folder")
        elif not self.decode_addresses:
            raise ValueError("decode_addresses: at least one decode pod is needed")
        if self.canary_file is not None and self.canary_configmaps:
            raise ValueError("canary_file: give either this or canary_configmaps")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file: give both or none")
        return self

    def model_specs(self) -> tuple[ModelSpec, ...]:
        """Return what is served. Raises ModelsFileError."""
        if self.models_file is not None:
            return tuple(
                msgspec.structs.replace(
                    spec, special_tokens_in_content=spec.special_tokens_in_content or self.special_tokens_in_content
                )
                for spec in read_models(self.models_file)
            )
        assert self.model is not None
        pool = PoolSpec(decode=tuple(self.decode_addresses), prefill=tuple(self.prefill_addresses))
        name = self.served_model_name or self.model.resolve().name
        return (
            ModelSpec(
                name=name,
                folder=self.model,
                chat_template=self.chat_template,
                tool_call_parser=self.tool_call_parser,
                special_tokens_in_content=self.special_tokens_in_content,
                use_generation_config=self.use_generation_config,
                pools=(pool,),
            ),
        )
