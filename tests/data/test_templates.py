import pytest

from longtrain.assets import asset_dir
from longtrain.config import RunConfig
from longtrain.data.chat.mask import audit, check_template, render, render_prompt, spans
from longtrain.errors import ConfigError
from longtrain.targets.tokenizer import read_tokenizer

CHAT = [
    {"role": "user", "content": "Who wrote it?"},
    {"role": "assistant", "content": "She did."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "In May,\nI think."},
]
END = {
    "vicuna": "</s>",
    "llama3": "<|eot_id|>",
    "chatml": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "qwen25": "<|im_end|>",
    "harmony": "<|return|>",
}
SYSTEM = {
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "qwen25": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
}
OWN = {
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\n" + SYSTEM["smollm2"] + "<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen25": (
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n{%- else %}\n"
        "    {{- '<|im_start|>system\\n" + SYSTEM["qwen25"] + "<|im_end|>\\n' }}\n{%- endif %}\n"
        "{%- for message in messages %}\n"
        '    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or '
        '(message.role == "assistant" and not message.tool_calls) %}\n'
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        "    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
}
"""The models' own templates, Qwen's without its tools."""
CHATML = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
VICUNA = (
    "<|endoftext|>A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions. "
)
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "
    "Channel must be included for every message.<|end|>"
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TEXT = {
    "harmony": HARMONY + f"<|start|>user<|message|>Who wrote it?<|end|>{FINAL}She did.<|end|>"
    f"<|start|>user<|message|>When?<|end|>{FINAL}In May,\nI think.<|return|>",
    "vicuna": VICUNA
    + "USER: Who wrote it? ASSISTANT: She did.</s>USER: When? ASSISTANT: In May,\nI think.</s>",
    "llama3": "<|endoftext|>"
    + "".join(f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content']}<|eot_id|>" for m in CHAT),
    "chatml": CHATML,
    **{name: f"<|im_start|>system\n{SYSTEM[name]}<|im_end|>\n{CHATML}" for name in SYSTEM},
}


@pytest.fixture
def make_tokenizer():
    def make(name):
        tokenizer, _ = read_tokenizer("tiny", chat_template=name)
        tokenizer.add_special_tokens({"eos_token": END[name]})
        return tokenizer

    return make


def test_each_bundled_template_is_tested():
    files = (asset_dir("conf") / "target" / "templates").glob("*.jinja")
    assert {file.stem for file in files} == set(TEXT)


@pytest.mark.parametrize("name", TEXT)
def test_bundled_templates_mark_answers_and_end_markers(name, make_tokenizer):
    tokenizer = make_tokenizer(name)
    check_template(tokenizer, "template")
    rendered = render(tokenizer, CHAT, how="template", name=name)
    assert tokenizer.decode(rendered.ids_T) == TEXT[name]
    assert audit(tokenizer, rendered, CHAT, name=name) == END[name]
    starts = [begin for begin, _ in spans(rendered.mask_T)]
    for turn, begin in zip((1, 3), starts, strict=True):  # generation begins where labels do
        prompt = tokenizer.decode(render_prompt(tokenizer, CHAT[:turn], name=name))
        assert prompt == tokenizer.decode(rendered.ids_T[:begin])


@pytest.mark.parametrize("name", TEXT)
def test_bundled_templates_take_a_system_message(name, make_tokenizer):
    tokenizer = make_tokenizer(name)
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    rendered = render(tokenizer, chat, how="template", name=name)
    assert audit(tokenizer, rendered, chat, name=name) == END[name]
    text = tokenizer.decode(rendered.ids_T)
    assert text.count("Be brief.") == 1 and "curious user" not in text
    assert SYSTEM.get(name, "(none)") not in text


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("chat", [CHAT, [{"role": "system", "content": "Be brief."}, *CHAT], CHAT[:1]])
@pytest.mark.parametrize("ask", [False, True])
def test_chatml_of_published_models_is_their_own_text(name, chat, ask, make_tokenizer):
    tokenizer = make_tokenizer(name)
    ours = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask)
    tokenizer.chat_template = OWN[name]
    assert ours == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask)


def test_a_file_or_a_context_over_the_targets_own(tokenizer_folder, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0]['content'] }}")
    tokenizer, context = read_tokenizer(str(tokenizer_folder), chat_template=str(file), max_positions=4096)
    assert tokenizer.chat_template == file.read_text() and context == 4096
    assert read_tokenizer(str(tokenizer_folder))[1] == 512
    with pytest.raises(
        ConfigError, match=r"chat_template=absent .*chatml, harmony, llama3, qwen25, smollm2, vicuna"
    ):
        read_tokenizer(str(tokenizer_folder), chat_template="absent")


def test_overrides_come_from_the_configuration():
    def overrides(**target):
        return RunConfig({"target": target}).target.overrides

    assert overrides(path="x") == {"max_positions": None, "chat_template": None}
    given = {"max_positions": 16384, "chat_template": "vicuna"}
    assert overrides(**given) == given
    for wrong in (0, "16k"):
        with pytest.raises(ConfigError, match=f"target.max_positions={wrong}"):
            overrides(max_positions=wrong)
