"""The chat template of a model that came from others takes no more of this machine than it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn import chat_question as module
from cairn.chat_question import chat_question
from protocol.errors import CairnError
from protocol.spec import ChatSpec

ENDLESS = "{% for i in range(99999) %}" * 6 + "{% endfor %}" * 6


def test_a_prompt_is_a_users_message_in_the_format_of_the_run_or_else_of_the_model_itself(tmp_path: Path):
    chat = ChatSpec(template="<{{ messages[0].role }}>{{ messages[0].content }}", end_tokens=[0])
    tokenizer = tmp_path / "tokenizer.json"
    assert chat_question("the fox?", None, tokenizer) is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert chat_question("the fox?", None, tokenizer) == "the fox?!"
    assert chat_question("the fox?", chat, tokenizer) == "<user>the fox?"


@pytest.mark.parametrize(
    ("template", "seconds", "said"),
    [
        (ENDLESS, 3.0, "took longer than 3 s and was ended"),
        ("{{ 'a' * 10 ** 12 }}", None, "[Mm]emory"),
        ("{{ 'a' * 2000000 }}", None, "more in a line than is taken"),
    ],
)
def test_a_template_without_end_is_ended_with_a_remedy(tmp_path: Path, monkeypatch, template, seconds, said):
    monkeypatch.setattr(module, "SECONDS", seconds or module.SECONDS)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(CairnError, match=f"chat template is not usable: .*{said}.*; --raw continues"):
        chat_question("the fox?", None, tmp_path / "tokenizer.json")
