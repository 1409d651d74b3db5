"""From a line of data to token ids and a loss mask: what is supervised, what is skipped, and why.

    python -m pytest tests/test_data.py

Golden texts are a sample's own ids as text, with supervised tokens in «…». The generation prompt of the tiny
model's template ends in "<think>\\n"; "\\n\\n" is one token, and one that begins in a prompt is in no turn.
"""
import json
import random
import shutil
from functools import cache
from itertools import groupby

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import extract
import tiny
from extract import Encoder, Options, Skip

OPEN = "<|im_end|>\n<|im_start|>assistant\n<think>\n"  # what ends a turn and begins one, as data has it


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """encoder(template, specials, **options) -> Encoder with the tiny tokenizer and a template's specials."""
    plain = tmp_path_factory.mktemp("data") / "tokenizer"
    tiny.make_tokenizer(plain)

    @cache
    def make(template=tiny.CHAT_TEMPLATE.strip(), specials=(), begin=False, vocab=tiny.VOCAB, **options):
        folder = tmp_path_factory.mktemp("tokenizer") / "it"
        shutil.copytree(plain, folder)
        if begin:  # a tokenizer that sets <|endoftext|> before everything that it encodes
            fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
            fast.post_processor = TemplateProcessing("<|endoftext|> $A", special_tokens=[
                ("<|endoftext|>", fast.token_to_id("<|endoftext|>"))])
            fast.save(str(folder / "tokenizer.json"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        made = Encoder(Options(**{"template_args": "{}"} | options), folder, vocab)
        made.load()
        return made
    return make


def encode(encoder, *messages, **line):
    return encoder.encode(json.dumps({"messages": messages} | line).encode())


def golden(encoder, *messages, **line):
    _, ids, mask, lost = encode(encoder, *messages, **line)
    assert not lost
    out = ""
    for kept, run in groupby(zip(ids.tolist(), mask.tolist()), lambda pair: pair[1]):
        text = encoder.tokenizer.decode([i for i, _ in run], clean_up_tokenization_spaces=False)
        out += f"«{text}»" if kept else text
    return out


def skipped(encoder, line):
    with pytest.raises(Skip) as caught:
        encoder.encode(line if isinstance(line, bytes) else json.dumps(line).encode())
    return caught.value.args


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text} | more


def calls(text, *arguments, **more):
    functions = [{"name": "measure", "arguments": a} for a in arguments]
    return says(text, tool_calls=[{"type": "function", "function": f} for f in functions], **more)


def tool(text):
    return {"role": "tool", "content": text}


# ---- what is supervised, with the tiny model's template

GOLDEN = {
    "several_turns": ([system("Add."), user("2+2?"), says("4"), user("+3?"), says("7")], """\
<|im_start|>system
Add.<|im_end|>
<|im_start|>user
2+2?<|im_end|>
<|im_start|>assistant
«4<|im_end|>»
<|im_start|>user
+3?<|im_end|>
<|im_start|>assistant
<think>

«</think>

7<|im_end|>»
"""),
    "thinking_inline_in_the_last_turn": ([user("Prime?"), says("<think>\n7 * 13.\n</think>\n\nNo.")], """\
<|im_start|>user
Prime?<|im_end|>
<|im_start|>assistant
<think>
«7 * 13.
</think>

No.<|im_end|>»
"""),
    "thinking_under_its_own_key": ([user("Prime?"), says("No.", reasoning_content="7 * 13.")], """\
<|im_start|>user
Prime?<|im_end|>
<|im_start|>assistant
<think>
«7 * 13.
</think>

No.<|im_end|>»
"""),
    "thinking_of_earlier_turns_is_dropped": ([
        user("15?"), says("<think>\n3 * 5.\n</think>\n\nNo."),
        user("16?"), says("Nor.", reasoning_content="2 * 8."),
        user("17?"), says("<think>\nOdd.\n</think>\n\nYes.")], """\
<|im_start|>user
15?<|im_end|>
<|im_start|>assistant
«No.<|im_end|>»
<|im_start|>user
16?<|im_end|>
<|im_start|>assistant
«Nor.<|im_end|>»
<|im_start|>user
17?<|im_end|>
<|im_start|>assistant
<think>
«Odd.
</think>

Yes.<|im_end|>»
"""),
    "an_empty_think_block": ([user("Go?"), says("<think>\n\n</think>\n\nYes.")], """\
<|im_start|>user
Go?<|im_end|>
<|im_start|>assistant
<think>

«</think>

Yes.<|im_end|>»
"""),
    "a_tool_loop": ([user("Size?"), calls("", {"place": "hut"}), tool("3 m"), says("Three.")], """\
<|im_start|>user
Size?<|im_end|>
<|im_start|>assistant
<think>

«</think>

<tool_call>
<function=measure>
<parameter=place>
hut
</parameter>
</function>
</tool_call><|im_end|>»
<|im_start|>user
<tool_response>
3 m
</tool_response><|im_end|>
<|im_start|>assistant
<think>

«</think>

Three.<|im_end|>»
"""),
    "an_empty_tool_output": ([user("Size?"), calls("I look.", {}), tool(""), calls("", {}), tool(None),
                              says("None found.")], """\
<|im_start|>user
Size?<|im_end|>
<|im_start|>assistant
<think>

«</think>

I look.

<tool_call>
<function=measure>
</function>
</tool_call><|im_end|>»
<|im_start|>user
<tool_response>

</tool_response><|im_end|>
<|im_start|>assistant
<think>

«</think>

<tool_call>
<function=measure>
</function>
</tool_call><|im_end|>»
<|im_start|>user
<tool_response>

</tool_response><|im_end|>
<|im_start|>assistant
<think>

«</think>

None found.<|im_end|>»
"""),
    "parallel_calls_after_thinking_and_text": ([
        user("Sizes?"), calls("Both.", {"times": 2}, {"place": "pit"}, reasoning_content="Two."),
        tool("3 m"), tool("4 m"), says("3 and 4.")], """\
<|im_start|>user
Sizes?<|im_end|>
<|im_start|>assistant
<think>
«Two.
</think>

Both.

<tool_call>
<function=measure>
<parameter=times>
2
</parameter>
</function>
</tool_call>
<tool_call>
<function=measure>
<parameter=place>
pit
</parameter>
</function>
</tool_call><|im_end|>»
<|im_start|>user
<tool_response>
3 m
</tool_response>
<tool_response>
4 m
</tool_response><|im_end|>
<|im_start|>assistant
<think>

«</think>

3 and 4.<|im_end|>»
"""),
    "a_tool_response_as_a_user_s_text_is_no_query": ([
        user("Size?"), says("I look."), user("<tool_response>\n3 m\n</tool_response>"), says("Three.")], """\
<|im_start|>user
Size?<|im_end|>
<|im_start|>assistant
<think>

«</think>

I look.<|im_end|>»
<|im_start|>user
<tool_response>
3 m
</tool_response><|im_end|>
<|im_start|>assistant
<think>

«</think>

Three.<|im_end|>»
"""),
    "literal_specials_of_a_user": ([user(f"What is {OPEN}x?"), says("Marks."), user(OPEN + "?"), says("Too."),
                                    user("And " + OPEN), says("Too.")], """\
<|im_start|>user
What is <|im_end|>
<|im_start|>assistant
<think>
x?<|im_end|>
<|im_start|>assistant
«Marks.<|im_end|>»
<|im_start|>user
<|im_end|>
<|im_start|>assistant
<think>
?<|im_end|>
<|im_start|>assistant
«Too.<|im_end|>»
<|im_start|>user
And <|im_end|>
<|im_start|>assistant
<think><|im_end|>
<|im_start|>assistant
<think>

«</think>

Too.<|im_end|>»
"""),
    "a_literal_end_of_thinking_of_a_user": ([
        user("Go?"), says("Yes."), user("What ends <|im_end|> at </think> here?"), says("You.")], """\
<|im_start|>user
Go?<|im_end|>
<|im_start|>assistant
«Yes.<|im_end|>»
<|im_start|>user
What ends <|im_end|> at </think> here?<|im_end|>
<|im_start|>assistant
<think>

«</think>

You.<|im_end|>»
"""),
    "a_log_of_another_chat_in_a_user_s_text": ([
        user("Read:\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nb\n</think>"),
        says("Read.")], """\
<|im_start|>user
Read:
<|im_start|>user
a<|im_end|>
<|im_start|>assistant
<think>
b
</think><|im_end|>
<|im_start|>assistant
<think>

«</think>

Read.<|im_end|>»
"""),
    "literal_specials_of_a_tool": ([
        user("Log?"), calls("", {}), tool(f"a{OPEN}b</think>"), says("Odd.")], """\
<|im_start|>user
Log?<|im_end|>
<|im_start|>assistant
<think>

«</think>

<tool_call>
<function=measure>
</function>
</tool_call><|im_end|>»
<|im_start|>user
<tool_response>
a<|im_end|>
<|im_start|>assistant
<think>
b</think>
</tool_response><|im_end|>
<|im_start|>assistant
<think>

«</think>

Odd.<|im_end|>»
"""),
    "literal_specials_of_the_assistant": ([
        user("Marks?"), says("<|im_end|>\n<|im_start|>assistant\nx"),
        user("And?"), says("y", reasoning_content="<|im_end|> ends.")], """\
<|im_start|>user
Marks?<|im_end|>
<|im_start|>assistant
«<|im_end|>
<|im_start|>assistant
x<|im_end|>»
<|im_start|>user
And?<|im_end|>
<|im_start|>assistant
<think>
«<|im_end|> ends.
</think>

y<|im_end|>»
"""),
    "literal_specials_in_a_call_before_another_turn": ([
        user("Go."), calls("So.", {"place": OPEN}), says("Done."), user("?"), says("Yes.")], """\
<|im_start|>user
Go.<|im_end|>
<|im_start|>assistant
«So.

<tool_call>
<function=measure>
<parameter=place>
<|im_end|>
<|im_start|>assistant
<think>

</parameter>
</function>
</tool_call><|im_end|>»
<|im_start|>assistant
«Done.<|im_end|>»
<|im_start|>user
?<|im_end|>
<|im_start|>assistant
<think>

«</think>

Yes.<|im_end|>»
"""),
    "the_assistant_speaks_first_and_twice": ([
        says("Hello."), says("Ask."), user("Go?"), says("Yes."), says("Now.")], """\
<|im_start|>assistant
«Hello.<|im_end|>»
<|im_start|>assistant
«Ask.<|im_end|>»
<|im_start|>user
Go?<|im_end|>
<|im_start|>assistant
<think>

«</think>

Yes.<|im_end|>»
<|im_start|>assistant
<think>

«</think>

Now.<|im_end|>»
"""),
    "empty_texts": ([user("Go."), says(""), user(" \n"), says(None), user(None), says("\t")], """\
<|im_start|>user
Go.<|im_end|>
<|im_start|>assistant
«<|im_end|>»
<|im_start|>user
<|im_end|>
<|im_start|>assistant
«<|im_end|>»
<|im_start|>user
<|im_end|>
<|im_start|>assistant
<think>

«</think>

<|im_end|>»
"""),
    "white_space_and_tags_about_a_text": ([
        user(" <b>a</b>\n"), says("\n <b>c</b> "), user("<b>"), says("</b>"),
        user("?"), says("\n\n<i>d")], """\
<|im_start|>user
<b>a</b><|im_end|>
<|im_start|>assistant
«<b>c</b><|im_end|>»
<|im_start|>user
<b><|im_end|>
<|im_start|>assistant
«</b><|im_end|>»
<|im_start|>user
?<|im_end|>
<|im_start|>assistant
<think>

«</think>

<i>d<|im_end|>»
"""),
    "characters_of_many_bytes": ([
        user("数\u0301学🙂"), says("🙂語e\u0301"), user("é"), says("🙂", reasoning_content="語")], """\
<|im_start|>user
数\u0301学🙂<|im_end|>
<|im_start|>assistant
«🙂語é<|im_end|>»
<|im_start|>user
é<|im_end|>
<|im_start|>assistant
<think>
«語
</think>

🙂<|im_end|>»
"""),
    "private_use_characters": ([
        user("\ue000?"), says("\ue000a\ue001"), user("\ue001<|im_end|>"), says("\ue001\ue000")], """\
<|im_start|>user
\ue000?<|im_end|>
<|im_start|>assistant
«\ue000a\ue001<|im_end|>»
<|im_start|>user
\ue001<|im_end|><|im_end|>
<|im_start|>assistant
<think>

«</think>

\ue001\ue000<|im_end|>»
"""),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_supervised_is_what_the_model_would_have_said(encoder, name):
    messages, text = GOLDEN[name]
    assert golden(encoder(), *messages) == text


def test_a_prompt_without_thinking_leaves_the_answer_alone_supervised(encoder):
    quick = encoder(template_args='{"enable_thinking": false}')
    assert golden(quick, user("15?"), says("No."), user("17?"), says("Yes.")) == """\
<|im_start|>user
15?<|im_end|>
<|im_start|>assistant
«No.<|im_end|>»
<|im_start|>user
17?<|im_end|>
<|im_start|>assistant
<think>

</think>

«Yes.<|im_end|>»
"""


def test_thinking_under_a_prompt_without_it_starts_behind_its_tag(encoder):
    quick = encoder(template_args='{"enable_thinking": false}')
    assert golden(quick, user("17?"), says("Yes.", reasoning_content="Odd.")) == """\
<|im_start|>user
17?<|im_end|>
<|im_start|>assistant
<think>
«Odd.
</think>

Yes.<|im_end|>»
"""


def test_thinking_that_is_preserved_is_supervised_in_every_turn(encoder):
    keeping = encoder(template_args='{"preserve_thinking": true}')
    assert golden(keeping, user("15?"), says("No.", reasoning_content="3 * 5."), user("16?"), says("Nor."),
                  user("17?"), says("<think>\nOdd.\n</think>\n\nYes.")) == """\
<|im_start|>user
15?<|im_end|>
<|im_start|>assistant
<think>
«3 * 5.
</think>

No.<|im_end|>»
<|im_start|>user
16?<|im_end|>
<|im_start|>assistant
<think>

«</think>

Nor.<|im_end|>»
<|im_start|>user
17?<|im_end|>
<|im_start|>assistant
<think>
«Odd.
</think>

Yes.<|im_end|>»
"""


def pieces(messages):
    """The tiny template once more, by hand and without tools: [(text, supervised)]."""
    queries = [i for i, m in enumerate(messages) if m["role"] == "user"]
    out = []
    for i, m in enumerate(messages):
        text, role, thought = (m["content"] or "").strip(), m["role"], m.get("reasoning_content")
        if role == "tool":
            head = "" if messages[i - 1]["role"] == "tool" else "<|im_start|>user"
            tail = "" if [n["role"] for n in messages[i + 1:i + 2]] == ["tool"] else "<|im_end|>\n"
            out.append((f"{head}\n<tool_response>\n{text}\n</tool_response>{tail}", False))
            continue
        out.append((f"<|im_start|>{role}\n", False))
        if role == "assistant":
            if thought is None and "</think>" in text:
                thought = text.split("</think>")[0].split("<think>")[-1]
                text = text.split("</think>")[-1].lstrip("\n")
            if i > max(queries):
                out.append(("<think>\n", False))
                text = f"{(thought or '').strip()}\n</think>\n\n{text}"
            for k, call in enumerate(m.get("tool_calls", [])):
                text += "\n" if k else "\n\n" if text and not text.endswith("\n\n") else ""
                text += "<tool_call>\n<function=measure>\n<parameter=place>\n"
                text += call["function"]["arguments"]["place"] + "\n</parameter>\n</function>\n</tool_call>"
        out += [(text + "<|im_end|>", role == "assistant"), ("\n", False)]
    return out


def random_chat(rng):
    texts = ["x", " garden", "\n", "\n\n", " ", "1", "é", "e\u0301", "🙂", "<b>", "</b>", "<|im_end|>", OPEN,
             "<|im_start|>", "<|im_start|>assistant\n", "<|im_start|>user\n", "</think>", "\ue000", "{{ x }}"]
    text = lambda: "".join(rng.choices(texts, k=rng.choice([0, 1, 1, 2, 4])))
    messages = [system(text())] if rng.random() < 0.3 else []
    for _ in range(rng.choice([1, 2, 3])):
        messages.append(user("Q" + text()))
        while rng.random() < 0.4:
            call = calls("Look" * rng.randrange(2), *[{"place": text()} for _ in range(rng.choice([1, 2]))])
            messages += [call] + [tool(rng.choice([None, text()])) for _ in call["tool_calls"]]
        messages.append(rng.choice([says(None), says(text()), says(text(), reasoning_content=text()),
                                    says(f"<think>\n{text()}\n</think>\n\n{text()}")]))
    return messages


@pytest.mark.parametrize("seed", range(8))
def test_random_chats_are_supervised_as_a_renderer_by_hand_says(encoder, seed):
    rng, it = random.Random(seed), encoder(max_len=32768)
    for _ in range(60):
        messages = random_chat(rng)
        rendered = pieces(messages)
        coded = it.tokenizer("".join(text for text, _ in rendered), add_special_tokens=False,
                             return_offsets_mapping=True)
        ends = np.cumsum([len(text) for text, _ in rendered]).tolist()
        turns = [(end - len(text), end) for (text, kept), end in zip(rendered, ends) if kept]
        _, ids, mask, lost = encode(it, *messages)
        assert ids.tolist() == coded["input_ids"], messages
        begins = [begin for begin, _ in coded["offset_mapping"]]
        assert mask.tolist() == [any(b <= begin < e for b, e in turns) for begin in begins], messages
        assert not lost


# ---- other templates

EACH = "{% for m in messages %}"
HEADER = "'<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n'"
LLAMA = (EACH + "{{ " + HEADER + " ~ m.content|trim }}"
         "{{ '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
         ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"))
GEMMA = (EACH + "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}"
         "{{ m.content|trim ~ '<end_of_turn>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
         ("<start_of_turn>", "<end_of_turn>"))
MISTRAL = (EACH + "{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}"
           "{% else %}{{ ' ' ~ m.content ~ '</s>' }}{% endif %}{% endfor %}", ("[INST]", "[/INST]", "</s>"))
DEEPSEEK = (EACH + "{% if m.role == 'user' %}{{ '<｜User｜>' ~ m.content }}{% else %}{{ '<｜Assistant｜>' ~ "
            "m.content.split('</think>')[-1] ~ '<｜end｜>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
            ("<｜User｜>", "<｜Assistant｜>", "<｜end｜>"))
CHANNELS = (EACH + "{{ '<|start|>' ~ m.role ~ ('<|channel|>final' if m.role == 'assistant' else '') }}"
            "{{ '<|message|>' ~ m.content ~ '<|end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
            ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"))
PLAIN = (EACH + "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", ())
TAGGED = (EACH + "{% if m.role == 'assistant' %}{{ '\n' }}{% generation %}{{ m.content }}{% endgeneration %}"
          "{{ '\n' }}{% else %}{{ m.role ~ ': ' ~ m.content }}{% endif %}{% endfor %}", ())
ENDLESS = (EACH + "{{ '### ' ~ m.role ~ ':\n' ~ m.content ~ '\n\n' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}", ())
OTHERS = {
    "llama": (LLAMA, "<|start_header_id|>user<|end_header_id|>\n\nA?<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n«b.<|eot_id|>»"
              "<|start_header_id|>user<|end_header_id|>\n\n<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n«d<|eot_id|>»"),
    "gemma": (GEMMA, "<start_of_turn>user\nA?<end_of_turn>\n<start_of_turn>model\n«b.<end_of_turn>»\n"
              "<start_of_turn>user\n<end_of_turn>\n<start_of_turn>model\n«d<end_of_turn>»\n"),
    "mistral": (MISTRAL, "[INST] A? [/INST]« b.</s>»[INST]  [/INST]« d</s>»"),
    "deepseek": (DEEPSEEK, "<｜User｜>A?<｜Assistant｜>«b.<｜end｜>»<｜User｜><｜Assistant｜>«d<｜end｜>»"),
    "channels": (CHANNELS, "<|start|>user<|message|>A?<|end|>"
                 "<|start|>assistant«<|channel|>final<|message|>b.<|end|>»"
                 "<|start|>user<|message|><|end|><|start|>assistant«<|channel|>final<|message|>d<|end|>»"),
    "plain": (PLAIN, "<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n«b.<|im_end|>»\n"
              "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n«d<|im_end|>»\n"),
    "tagged": (TAGGED, "user: A?\n«b.»\nuser: \n«d»\n"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_supervised_under_other_templates(encoder, name):
    template, text = OTHERS[name]
    assert golden(encoder(*template, vocab=700), user("A?"), says("b."), user(""), says("d")) == text


@pytest.mark.parametrize("name", ["llama", "gemma", "mistral", "deepseek", "plain"])
def test_literal_specials_under_other_templates_begin_and_end_nothing(encoder, name):
    it = encoder(*OTHERS[name][0], vocab=700)
    literal = "x" + golden(it, user("A?"), says("b.")).replace("«", "").replace("»", "").strip() + "y"
    text = golden(it, user(literal), says(literal), user(literal), says("d"))
    starts = [part.partition("»")[0].strip().startswith(literal) for part in text.split("«")]
    assert starts == [False, True, False]
    assert [part.partition("»")[2].count(literal) for part in ("»" + text).split("«")] == [1, 1, 0]


def test_literal_specials_in_a_tool_s_description_begin_nothing(encoder):
    template = "{% for t in tools or [] %}{{ t.function.description }}{% endfor %}" + PLAIN[0]
    literal = "<|im_start|>assistant\nx<|im_end|>\n"
    tools = [{"type": "function", "function": {"name": "measure", "description": literal}}]
    assert golden(encoder(template), user("A?"), says("b."), tools=tools) == literal + """\
<|im_start|>user
A?<|im_end|>
<|im_start|>assistant
«b.<|im_end|>»
"""


def test_a_template_that_changes_literal_specials_gets_no_mask_at_a_guess(encoder):
    it = encoder(PLAIN[0].replace("m.content", "m.content|replace('<|im_end|>', '')"))
    assert golden(it, user("A?"), says("b.")).endswith("«b.<|im_end|>»\n")
    assert skipped(it, {"messages": [user("A<|im_end|>?"), says("b.")]})[0] == "nothing_supervised"


def test_a_tagged_turn_of_token_0_alone_is_one_token(encoder):
    template = EACH + ("{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
                       "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}")
    assert golden(encoder(template), says("1"), user("more?")) == "«1»\nmore?\n"


def test_a_token_that_begins_before_a_tagged_turn_is_not_supervised(encoder):
    assert golden(encoder(*TAGGED), user("A?"), says("\nb")) == "user: A?\n\n«b»\n"


def test_a_template_without_end_of_turn_supervises_nothing_and_says_so(encoder):
    messages = [user("A?"), says("b\n\nc"), user("D"), says("e")]
    reason, detail, _ = skipped(encoder(*ENDLESS), {"messages": messages})
    assert reason == "nothing_supervised" and "2 turns" in detail


def test_a_turn_that_ends_otherwise_is_lost_counted_and_alone(encoder):
    it = encoder(*LLAMA, vocab=700)
    _, ids, mask, lost = encode(it, user("A?"), calls("call", {}), tool("out"), says("d"))
    assert (it.tokenizer.decode(ids[mask == 1]), lost) == ("d<|eot_id|>", 1)


# ---- turns that the data takes out

@pytest.mark.parametrize("key, value", [("weight", 0), ("weight", 0.0), ("loss", False), ("loss", 0)])
@pytest.mark.parametrize("template", [None, TAGGED], ids=["located", "tagged"])
def test_a_turn_of_no_weight_is_not_supervised_and_not_lost(encoder, template, key, value):
    it = encoder(*template) if template else encoder()
    plain = golden(it, user("A?"), says("b."), user("C?"), says("d."))
    text = golden(it, user("A?"), says("b.", **{key: value}), user("C?"), says("d.", weight=1))
    first, second = plain.index("«"), plain.index("»")
    assert text == plain[:first] + plain[first + 1:second] + plain[second + 1:]


def test_weights_of_other_speakers_and_null_change_nothing(encoder):
    turns = [{"from": "system", "value": "S", "weight": None}, {"from": "human", "value": "A?", "weight": 0},
             {"from": "gpt", "value": "b.", "weight": None}]
    same(encoder(), {"conversations": turns}, {"messages": [system("S"), user("A?"), says("b.")]})


def test_with_a_turn_lost_no_weight_is_put_on_another_one(encoder):
    it, turns = encoder(*LLAMA, vocab=700), [user("A?"), calls("call", {}), tool("out"), says("d", weight=0)]
    assert skipped(it, {"messages": turns})[0] == "nothing_supervised"
    turns[1]["weight"], turns[3]["weight"] = 0, 1
    assert skipped(it, {"messages": turns})[0] == "nothing_supervised"


# ---- length

CHAT = [user("Is 🙂 a word?"), says("Nay, a picture."),
        user("And 数学?"), says("Two words.", reasoning_content="数, 学.")]


def test_truncation_at_any_length_shifts_no_mask(encoder):
    _, ids, mask, _ = encode(encoder(), *CHAT)
    first = mask.tolist().index(1)
    for n in range(first + 1, len(ids) + 2):
        it = Encoder(Options(max_len=n), encoder().path, tiny.VOCAB)
        it.__dict__ |= {k: v for k, v in encoder().__dict__.items() if k != "o"}
        _, cut, kept, _ = encode(it, *CHAT)
        assert (cut.tolist(), kept.tolist()) == (ids[:n].tolist(), mask[:n].tolist())


def test_a_prompt_that_fills_the_limit_is_skipped(encoder):
    first = encode(encoder(), *CHAT)[2].tolist().index(1)
    assert skipped(encoder(max_len=first), {"messages": CHAT})[0] == "nothing_supervised"


def test_a_sample_of_just_the_limit_is_not_too_long(encoder):
    n = len(encode(encoder(), *CHAT)[1])
    assert len(encode(encoder(max_len=n, overlong="skip"), *CHAT)[1]) == n


def test_a_longer_sample_is_skipped_where_that_is_asked_for(encoder):
    n = len(encode(encoder(), *CHAT)[1])
    reason, detail, _ = skipped(encoder(max_len=n - 1, overlong="skip"), {"messages": CHAT})
    assert reason == "too_long" and f"{n} tokens" in detail


@pytest.mark.parametrize("option, reason", [
    ("min_len", "too_short"), ("min_supervised", "nothing_supervised")])
def test_a_sample_below_a_minimum_is_skipped_and_one_at_it_is_not(encoder, option, reason):
    _, ids, mask, _ = encode(encoder(), *CHAT)
    n = len(ids) if option == "min_len" else int(mask.sum())
    assert len(encode(encoder(**{option: n}), *CHAT)[1]) == len(ids)
    assert skipped(encoder(**{option: n + 1}), {"messages": CHAT})[0] == reason


# ---- ways to write one conversation

def same(encoder, one, other):
    one, other = (encoder.encode(json.dumps(line).encode()) for line in (one, other))
    assert one[1].tolist() == other[1].tolist() and one[2].tolist() == other[2].tolist()


def test_sharegpt_with_system_equals_messages(encoder):
    turns = [("human", "One?"), ("gpt", "1"), ("human", "Two?"), ("gpt", "2")]
    same(encoder(), {"system": "Count.", "conversations": [{"from": f, "value": v} for f, v in turns]},
         {"messages": [system("Count."), user("One?"), says("1"), user("Two?"), says("2")]})


def test_sharegpt_s_observation_is_a_tool(encoder):
    turns = [("human", "One?"), ("observation", "1"), ("gpt", "I see.")]
    same(encoder(), {"conversations": [{"from": f, "value": v} for f, v in turns]},
         {"messages": [user("One?"), tool("1"), says("I see.")]})


def test_a_list_of_text_parts_equals_the_plain_text(encoder):
    parts = lambda *texts: [{"type": "text", "text": text} for text in texts]
    same(encoder(),
         {"messages": [user(parts("Say ", "hi.")), says(parts("h", "i")), user(parts()), says(parts("o"))]},
         {"messages": [user("Say hi."), says("hi"), user(""), says("o")]})


def test_null_is_never_the_word_none(encoder):
    text = golden(encoder(), system(None), user(None), calls(None, {}), tool(None),
                  says(None, reasoning_content=None))
    assert "None" not in text


def test_arguments_as_an_object_and_as_json_text_are_equal(encoder):
    line = lambda arguments: {"messages": [user("Go."), calls("", arguments), tool("1"), says("Gone.")]}
    arguments = {"place": "é 🙂", "times": 3, "more": {"a": [1, None]}}
    same(encoder(), line(arguments), line(json.dumps(arguments)))


def test_arguments_as_an_empty_text_are_none(encoder):
    line = lambda arguments: {"messages": [user("Go."), calls("", arguments), tool("1"), says("Gone.")]}
    same(encoder(), line({}), line(""))


def test_a_call_with_and_without_its_wrapper_are_equal(encoder):
    line = lambda call: {"messages": [user("Go."), says("", tool_calls=[call]), tool("1"), says("Gone.")]}
    call = {"name": "measure", "arguments": '{"place": "hut"}'}
    same(encoder(), line(call), line({"type": "function", "function": call}))


def test_keys_that_are_null_are_as_keys_that_are_not_there(encoder):
    asking = "{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls|length }}{% endif %}{% endfor %}"
    call = {"name": "measure", "arguments": {"place": "hut"}}
    nulls = {"reasoning_content": None, "tool_calls": None, "name": None}
    parts = [{"type": "text", "text": "Go.", "image": None}]
    same(encoder(asking + PLAIN[0]),
         {"messages": [user(parts) | nulls, says(None, tool_calls=[{"id": None, "function": call}]),
                       tool("1") | nulls, says("Gone.") | nulls], "tools": None},
         {"messages": [user("Go."), says("", tool_calls=[{"function": call}]), tool("1"), says("Gone.")]})


def test_a_null_argument_is_an_argument(encoder):
    text = golden(encoder(), user("Go."), calls("", {"place": None}), tool("1"), says("Gone."))
    assert "<parameter=place>\nnull\n</parameter>" in text


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
def test_thinking_under_its_other_names_is_not_left_out(encoder, key):
    same(encoder(), {"messages": [user("17?"), says("Yes.", **{key: "Odd."})]},
         {"messages": [user("17?"), says("Yes.", reasoning_content="Odd.")]})


def test_a_single_function_call_is_a_tool_call(encoder):
    call = {"name": "measure", "arguments": '{"place": "hut"}'}
    same(encoder(), {"messages": [user("Go."), says(None, function_call=call)]},
         {"messages": [user("Go."), says(None, tool_calls=[{"type": "function", "function": call}])]})


@pytest.mark.parametrize("key", ["value", "text", "refusal"])
def test_a_role_with_the_text_under_another_key_is_not_empty(encoder, key):
    same(encoder(), {"conversations": [user("Go."), {"role": "assistant", key: "Gone.", "content": None}]},
         {"messages": [user("Go."), says("Gone.")]})


def test_tools_as_a_list_and_as_json_text_are_equal(encoder):
    line = lambda tools: {"messages": [user("Go."), says("Gone.")], "tools": tools}
    same(encoder(), line([tiny.TOOL]), line(json.dumps([tiny.TOOL])))


def test_tools_are_in_the_text(encoder):
    assert '"name": "measure"' in golden(encoder(), user("Go."), says("Gone."), tools=[tiny.TOOL])


# ---- ids

@pytest.mark.parametrize("name", GOLDEN)
def test_ids_are_those_of_the_chat_template_itself(encoder, name):
    messages = GOLDEN[name][0]
    texts = [m | {"content": m["content"] or ""} for m in messages]
    whole = encoder().tokenizer.apply_chat_template(texts, tokenize=True, return_dict=True)["input_ids"]
    assert encode(encoder(), *messages)[1].tolist() == whole


def test_special_tokens_are_not_added_a_second_time(encoder):
    ids = encode(encoder("<|endoftext|>" + PLAIN[0], begin=True), user("A?"), says("b."))[1].tolist()
    assert (ids[0], ids.count(ids[0])) == (tiny.TEXT_IDS, 1)


def test_ids_are_int32_and_the_mask_is_uint8(encoder):
    _, ids, mask, _ = encode(encoder(), *CHAT)
    assert (ids.dtype, mask.dtype) == (np.int32, np.uint8)


# ---- rows of ready ids

@pytest.fixture
def ready(tmp_path):
    """An encoder that has no tokenizer: rows of ready ids need none."""
    return Encoder(Options(), tmp_path, 640)


def test_ready_ids_keep_their_mask(ready):
    _, ids, mask, _ = ready.encode(b'{"input_ids": [5, 6, 7, 639], "loss_mask": [0, 1, 0, 1]}')
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 7, 639], [0, 1, 0, 1])


def test_ready_ids_without_a_mask_are_all_supervised(ready):
    assert ready.encode(b'{"input_ids": [5, 6, 7]}')[2].tolist() == [1, 1, 1]


def test_labels_are_a_mask_where_there_is_none(ready):
    assert ready.encode(b'{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}')[2].tolist() == [0, 1, 0]
    line = b'{"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "loss_mask": [1, 0, 0]}'
    assert ready.encode(line)[2].tolist() == [1, 0, 0]


@pytest.mark.parametrize("key", ["assistant_masks", "completion_mask"])
def test_a_mask_under_trl_s_names_is_the_mask(ready, key):
    line = json.dumps({"input_ids": [5, 6, 7], "labels": [5, 6, 7], key: [0, 1, 0]}).encode()
    assert ready.encode(line)[2].tolist() == [0, 1, 0]


def test_padding_is_taken_out_with_its_mask(ready):
    _, ids, mask, _ = ready.encode(
        b'{"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0], "loss_mask": [1, 0, 1, 0, 1]}')
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 7], [0, 1, 0])


def test_a_mask_may_be_true_and_false(ready):
    assert ready.encode(b'{"input_ids": [5, 6], "loss_mask": [false, true]}')[2].tolist() == [0, 1]


def test_ready_ids_are_truncated_with_their_mask(tmp_path):
    it = Encoder(Options(max_len=3), tmp_path, 640)
    _, ids, mask, _ = it.encode(b'{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}')
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 7], [0, 1, 0])


@pytest.mark.parametrize("line, reason, words", [
    ('{"input_ids": [5, 640]}', "id_out_of_range", "5 to 640"),
    ('{"input_ids": [-1, 5]}', "id_out_of_range", "-1 to 5"),
    ('{"input_ids": [5, 6, 7], "loss_mask": [0, 1]}', "unreadable", "loss_mask of 2 values"),
    ('{"input_ids": [5, 6], "loss_mask": [0, 2]}', "unreadable", "2]"),
    ('{"input_ids": [5, 6], "loss_mask": [0, 0]}', "nothing_supervised", ""),
    ('{"input_ids": []}', "too_short", "0 tokens"),
    ('{"input_ids": [5.0]}', "unreadable", "integers"),
    ('{"input_ids": "56"}', "unreadable", "integers"),
    ('{"input_ids": [[5, 6]]}', "unreadable", "integers"),
    ('{"input_ids": [5, 6], "labels": [5]}', "unreadable", "1 values"),
    ('{"input_ids": [5, 6], "labels": [-100, -100]}', "nothing_supervised", ""),
    ('{"input_ids": [5, 6], "attention_mask": [1]}', "unreadable", ""),
])
def test_ready_ids_that_cannot_be_used_are_skipped(ready, line, reason, words):
    why, detail, _ = skipped(ready, line.encode())
    assert why == reason and words in detail


# ---- what is skipped

IMAGE = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What is it?"}]
SKIPPED = {
    "not_json": (b'{"messages": [', "unreadable", "line 1 column"),
    "not_utf_8": (b'{"messages": "\xff"}', "unreadable", "utf-8"),
    "no_object": (b"[1]", "unreadable", ""),
    "nested_too_deeply": (b"[" * 100_000, "unreadable", "recursion"),
    "no_conversation": ({"text": "x"}, "unreadable", "no list under messages or conversations, no input_ids: ['text']"),
    "an_empty_conversation": ({"conversations": []}, "template_refused", "empty"),
    "an_empty_conversation_with_a_system": ({"system": "x", "conversations": []}, "template_refused",
                                            "No user"),
    "a_turn_that_is_no_object": ({"messages": ["x"]}, "unreadable", "no list under messages"),
    "an_unknown_speaker": ({"conversations": [{"from": "critic", "value": "x"}]}, "unreadable",
                           "unknown speaker 'critic'"),
    "an_unknown_role": ({"messages": [user("Q"), {"role": "critic", "content": "x"}]}, "template_refused",
                        "Unknown role: critic"),
    "no_user": ({"messages": [system("S"), says("Hello.")]}, "template_refused",
                "No user message asks anything."),
    "a_second_system": ({"messages": [system("S"), system("T"), user("Q"), says("A")]}, "template_refused",
                        "A system message must come first."),
    "a_late_system": ({"messages": [user("Q"), system("S"), says("A")]}, "template_refused",
                      "A system message must come first."),
    "an_image": ({"messages": [user(IMAGE), says("A cat.")]}, "unsupported_content", '"type":"image"'),
    "a_number_as_content": ({"messages": [user(3), says("A")]}, "unsupported_content", "3"),
    "no_assistant": ({"messages": [user("Q")]}, "nothing_supervised", "0 turns"),
    "a_lone_surrogate": ({"messages": [user("odd \ud83d"), says("A")]}, "unreadable", ""),
    "arguments_that_are_no_json": ({"messages": [user("Q"), calls("", '{"place": ')]}, "unreadable", ""),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_a_line_that_cannot_be_used_is_skipped_with_its_reason(encoder, name):
    line, reason, words = SKIPPED[name]
    why, detail, _ = skipped(encoder(), line)
    assert why == reason and words in detail


def test_ids_past_the_model_s_vocabulary_are_skipped(encoder):
    assert skipped(encoder(vocab=600), {"messages": CHAT})[0] == "id_out_of_range"


def test_a_skipped_line_is_named(encoder):
    assert skipped(encoder(), {"id": "r", "messages": [user("Q")]})[2] == "r"


def test_a_line_after_a_skipped_one_is_encoded(encoder):
    skipped(encoder(), SKIPPED["not_json"][0])
    assert golden(encoder(), *GOLDEN["several_turns"][0]) == GOLDEN["several_turns"][1]


# ---- names

@pytest.mark.parametrize("line, name", [
    ({"id": "a", "conversation_id": "b", "uuid": "c"}, "a"), ({"conversation_id": "b", "uuid": "c"}, "b"),
    ({"id": None, "uuid": "c"}, "c"), ({"id": 0}, "0"), ({"id": 12}, "12"), ({}, None)])
def test_a_sample_is_called_by_its_id(encoder, line, name):
    assert encode(encoder(), *CHAT, **line)[0] == name


@pytest.fixture
def tokenized(encoder, tmp_path):
    """The names, rows and skipped lines that a data file of `lines` gives."""
    def run(*lines):
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        o = Options(data=str(tmp_path / "chat.jsonl"), plan_workers=1)
        samples, names, _ = extract.tokenize(o, encoder().path, tiny.VOCAB,
                                             [tmp_path / "chat.jsonl"], tmp_path)
        return names, samples["row"].tolist(), [json.loads(line) for line in open(tmp_path / "skipped.jsonl")]
    return run


def test_a_sample_without_an_id_is_called_by_its_row(tokenized):
    assert tokenized({"id": "a", "messages": CHAT}, {"messages": [user("Q")]}, {"messages": CHAT})[:2] == (
        ["a", "2"], [0, 2])


def test_equal_ids_stay_separate(tokenized):
    assert tokenized(*[{"id": "a", "messages": CHAT}] * 3)[:2] == (["a"] * 3, [0, 1, 2])


def test_a_skipped_line_is_written_down(tokenized):
    [line] = tokenized({"messages": CHAT}, {"uuid": "u", "messages": [user("Q")]})[2]
    assert line.pop("detail")
    assert line == {"line": 2, "row": 1, "id": "u", "reason": "nothing_supervised"}


def test_names_can_be_written_as_utf_8(tokenized):
    names, _, lines = tokenized({"id": "\ud83d", "messages": CHAT}, {"id": "é", "messages": CHAT})
    assert (names, [line["reason"] for line in lines]) == (["é"], ["unreadable"])


# ---- a template that writes the date

def test_a_template_that_writes_today_s_date_is_warned_of(place, tmp_path, capfd):
    from warmup import determined_by
    folder = shutil.copytree(place.model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d') if not date_string }}" + PLAIN[0])
    determined_by(Options(), folder, "", [1], False)
    assert "--template-args '{\"date_string\": \"" in capfd.readouterr().out
    determined_by(Options(template_args='{"date_string": "26 Jul 2024"}'), folder, "", [1], False)
    assert not capfd.readouterr().out
