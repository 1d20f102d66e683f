"""The largest allowed size of each part of a request. A larger part is refused with a 400 that names the field.

The bounds limit how long one request can occupy the interpreter, and leave room for every normal use. The length of a
prompt depends on the model, so it is bounded by the context length that the model's pods report.
"""

# The JSON of a whole body, including the fields that the API ignores, because all of it is parsed at once.
MAX_JSON_CONTAINERS = 50_000  # objects and lists
MAX_JSON_STRINGS = 100_000  # includes the keys of objects
MAX_JSON_VALUES = 1_200_000  # includes numbers: a prompt of 1,048,576 token ids fits
# The JSON of the arguments of one tool call in an earlier turn of a conversation.
MAX_ARGUMENT_CONTAINERS = 20_000
MAX_ARGUMENT_STRINGS = 50_000
MAX_ARGUMENT_VALUES = 200_000

# A conversation.
MAX_MESSAGES = 8_192  # also the most items in the input of /v1/responses
MAX_PARTS = 1_024  # parts of the content of one message
MAX_MESSAGE_FIELDS = 32  # fields of one message beside role and content, for the chat template
MAX_EXTRA_VALUES = 4_096  # values inside one such field of a message, for example tool_calls
MAX_TEMPLATE_VALUES = 4_096  # values inside chat_template_kwargs
MAX_DOCUMENTS = 256  # documents that a chat template is given
MAX_THINKING_TOKENS = 1_048_576  # thinking_token_budget
MAX_NESTING = 32  # levels of nesting in such a field, and in chat_template_kwargs
MAX_RENDERED_CHARS = 16_777_216  # characters of a conversation that the chat template has rendered
MAX_RENDER_S = 10.0  # seconds that the chat template may take to render a conversation

# Tools and output formats. Their text is bounded by the setting max_grammar_chars.
MAX_TOOLS = 512  # OpenAI takes 128
MAX_SCHEMA_VALUES = 32_768  # values inside one JSON schema, or inside the parameters of all tools together
MAX_SCHEMA_NESTING = 192  # levels: JSON is not parsed any deeper; the setting max_schema_depth may be lower
MAX_CHOICE_OPTIONS = 16_384  # texts in a list from which the answer must be one
MAX_RULES_CHARS = 65_536  # a grammar of tool calls that the gateway writes: pods refuse a longer one
MAX_SCHEMA_NAME_CHARS = 256  # OpenAI takes 64

# Sampling.
MAX_LOGPROBS = 20  # alternatives per token
MAX_CHOICES = 128  # choices per prompt: n, best_of
MAX_STOPS = 16  # OpenAI takes 4
MAX_STOP_CHARS = 1_024
MAX_STOP_TOKENS = 1_024
MAX_LOGIT_BIASES = 16_384
MAX_ALLOWED_TOKENS = 65_536
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARS = 256
MAX_PROMPT_RULES = (
    524_288  # biases, stop tokens, allowed tokens and bad words of a request, times its number of prompts
)
MAX_SCORED = 4_194_304  # log probabilities of prompt tokens in one answer, including alternatives
MAX_KEPT_BYTES = 134_217_728  # memory of an answer that the gateway keeps until its end, as one that is not streamed
MAX_KEPT_ANSWERS = 4  # most memory of all answers of one tenant, with unread streams, as a multiple of the largest

# Names.
MAX_MODEL_CHARS = 1_024
MAX_USER_CHARS = 1_024  # user, prompt_cache_key
MAX_SESSION_CHARS = 1_024  # characters of the session header; a longer value is cut
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_IDENTIFIER_CHARS = 64  # safety_identifier
MAX_CALL_NAME_CHARS = 1_024  # ids and names of calls in the input of /v1/responses
MAX_INCLUDES = 64
