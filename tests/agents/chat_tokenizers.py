"""Small tokenizers with Qwen's markup tokens, and chat templates that write what those of Qwen2.5 and Qwen3 write."""

import functools
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As in Qwen's tokenizers, these are added tokens that are not flagged special.
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "system user assistant tool function functions name arguments type string number parameters description\n\n\n",
    "You are a helpful assistant. You may call one or more functions to assist with the user query.\n  \n    four",
    '{"type": "function", "function": {"name": "add", "description": "Adds two numbers."}}\n',
    "<|im_start|>assistant\n<tool_call>\n</tool_call><|im_end|>\n<think>\n\n</think>\n\nthe answer is <12> or |7|",
)

_TOOLS = (
    "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within "
    "<tools></tools> XML tags:\\n<tools>"
)
_HOW = (
    "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
_LIST = '{% for tool in tools %}{{ "\\n" ~ (tool | tojson) }}{% endfor %}'
# A run of results is one turn of the user.
_RESULT = (
    "{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' ~ (m.content if m.content is string else '') ~ '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_SAID = "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}"

QWEN25 = (
    "{%- set named = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}"
    "{{- '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == 'system' else named) }}"
    f'{{%- if tools %}}{{{{ "\\n\\n{_TOOLS}" }}}}{_LIST}{{{{ "{_HOW}" }}}}{{% endif %}}'
    "{{- '<|im_end|>\\n' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}" + _RESULT + "{%- elif m.role == 'assistant' and m.tool_calls %}"
    "{{ '<|im_start|>assistant' ~ ('\\n' ~ m.content if m.content else '') }}"
    "{%- for c in m.tool_calls %}{% set f = c.function if c.function is defined else c %}"
    "{{ '\\n<tool_call>\\n{\"name\": \"' ~ f.name ~ '\", \"arguments\": ' ~ (f.arguments | tojson) ~ '}\\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif m.role != 'system' or not loop.first %}" + _SAID + "{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Thoughts are shown after the last question alone, and an answer that ends the conversation always has some.
QWEN3 = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else none %}"
    "{%- if tools %}{{ '<|im_start|>system\\n' ~ (system ~ '\\n\\n' if system is not none else '') }}"
    f'{{{{ "{_TOOLS}" }}}}{_LIST}{{{{ "{_HOW}<|im_end|>\\n" }}}}'
    "{%- elif system is not none %}{{ '<|im_start|>system\\n' ~ system ~ '<|im_end|>\\n' }}{% endif %}"
    "{%- set last = namespace(question=messages | length - 1, found=false) %}"
    "{%- for m in messages | reverse %}"
    "{%- if not last.found and m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{%- set last.found = true %}{% set last.question = loop.revindex0 %}{% endif %}"
    "{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}" + _RESULT + "{%- elif m.role == 'assistant' %}"
    "{%- set s = namespace(thought='', text=m.content if m.content is string else '') %}"
    "{%- if m.reasoning_content is string %}{% set s.thought = m.reasoning_content %}"
    "{%- elif '</think>' in s.text %}"
    "{%- set s.thought = s.text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set s.text = s.text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{%- if loop.index0 > last.question and (loop.last or s.thought) %}"
    "{%- set shown = '<think>\\n' ~ s.thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ s.text.lstrip('\\n') %}"
    "{%- else %}{% set shown = s.text %}{% endif %}"
    "{{- '<|im_start|>assistant\\n' ~ shown }}"
    "{%- for c in m.tool_calls or [] %}{% set f = c.function or c %}"
    "{{- '\\n' if s.text or not loop.first else '' }}"
    '{{- \'<tool_call>\\n{"name": "\' ~ f.name ~ \'", "arguments": \' }}'
    "{{- (f.arguments if f.arguments is string else f.arguments | tojson) ~ '}\\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'user' or not loop.first %}" + _SAID + "{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3}

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "One."},
                "b": {"type": "number", "description": "Another."},
            },
            "required": ["a", "b"],
        },
    },
}


@functools.cache
def _backend() -> str:
    """A tokenizer.json: byte pairs of a few texts, cut into words as by Qwen's tokenizers."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=sorted(alphabet), show_progress=False)
    )
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    made.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    return made.to_str()


def chat_tokenizer(template: str, added: tuple[AddedToken, ...] = ()) -> Any:
    """A transformers tokenizer with Qwen's markup, whose end of sequence is <|im_end|>."""
    backend = Tokenizer.from_str(_backend())
    backend.add_tokens(list(added))
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made
