"""Chat templates render what transformers renders, and cannot leave their sandbox."""

import re
from datetime import datetime

import pytest

from attn_variants.checkpoints.chat import render

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 1 < 2 & 'yes'? Zürich"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]

TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m['role'] }}>{{ m.content }}</s>\n{% endfor %}",
    "prompt": "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}",
    "bos": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "blocks": """
    {% for m in messages %}
        {% if m.role == 'user' %}
    U: {{ m.content }}
        {% else %}
    O: {{ m.content }}
        {% endif %}
    {% endfor %}
    """,
    "json": "{{ messages | tojson }}\n{{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
        "{{ ns.n }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "tools": "{% if tools is none %}no tools{% endif %}{% if documents is defined %} documents{% endif %}",
    "methods": "{{ messages[1].content.split(' ')[0].upper() }}{{ messages | map(attribute='role') | join(',') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_in_transformers(name, add_generation_prompt):
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = theirs.render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=add_generation_prompt, **special
    )
    ours = render(TEMPLATES[name], MESSAGES, add_generation_prompt=add_generation_prompt, **special)
    assert ours == expected[0]


def test_html_is_not_escaped():
    assert render("{{ messages[0].content | tojson }}", [{"role": "user", "content": "a<b>&ü"}]) == '"a<b>&ü"'


def test_a_template_may_ask_for_the_date():
    assert render("{{ strftime_now('%Y') }}", []) in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_a_template_may_refuse_a_conversation():
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    with pytest.raises(ValueError, match="cannot render this conversation: begin with the user"):
        render(template, MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template):
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(ValueError, match="chat template"):
        render(template, messages)
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "template", ["{% for m in %}", "{{ nothing.at.all }}", "{{ messages[0].content + 1 }}", "{% endif %}"]
)
def test_a_broken_template_is_one_clear_error(template):
    with pytest.raises(ValueError, match="the chat template"):
        render(template, MESSAGES)


def test_a_message_must_be_a_dict():
    with pytest.raises(ValueError, match=re.escape("a message ('hello') must be a dict with `role` and `content`")):
        render("{{ messages }}", ["hello"])
