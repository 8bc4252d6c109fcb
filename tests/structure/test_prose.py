"""The check of prose: what it takes for a sentence, which sentences it refuses, and what it passes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose import MAX_WORDS, Finding, check, files, findings_in, main, of_markdown, of_proto, of_python


def rules(prose: str) -> list[str]:
    """Return the rules that a text breaks, as a Markdown page."""
    return [f.rule for p in of_markdown(prose) for f in findings_in(p, "page.md")]


def shown(paragraphs) -> list[str]:
    return [" ".join(text for _, text in p.lines) for p in paragraphs]


@pytest.mark.parametrize(
    "sentence",
    [
        "Who has announced knows its own header.",
        "A first sentence. What is held is not fetched.",
        "Whether it is there.",
        "Of whom nothing came for long, nothing is asked.",
        "- Where it stands is known.",
        "*Whoever watches* opens the page.",
        "(Which is why it fails.)",
        "`apply` is pure. Whatever comes is checked.",
    ],
)
def test_a_statement_that_opens_with_a_free_relative_is_found(sentence: str):
    assert rules(sentence) == ["opens with a free relative"]


@pytest.mark.parametrize(
    "sentence",
    [
        "What does a peer do?",
        "What is assumed:",
        "How long a peer waits depends on the round.",
        "A peer that has announced knows what it holds, and who asked.",
        '"Who goes there" is a quotation.',
        "`what` is a field.",
        "# What a heading says",
        "| What a table says | 1 |",
        "    What a literal block says.",
        "```\nWhat a fenced block says.\n```",
        "**What it is.** A run-in heading is a heading.",
    ],
)
def test_questions_headings_code_tables_and_quotations_are_no_statements(sentence: str):
    assert rules(sentence) == []


@pytest.mark.parametrize("sentence", ["Has a lock.", "Should it fail, nothing is lost.", "Is held for a minute."])
def test_a_statement_needs_a_subject_in_front_of_its_verb(sentence: str):
    assert rules(sentence) == ["has no subject, or is an inverted conditional"]


def test_a_sentence_has_at_most_thirty_words_and_code_counts_as_one():
    words = " ".join(["word"] * (MAX_WORDS - 1))
    assert rules(f"One {words}. Another {words}.") == []
    assert rules(f"One `a piece of code` {words}.") == [f"{MAX_WORDS + 1} words, at most {MAX_WORDS}"]
    assert rules(f"One, e.g. this, {words}.") == [f"{MAX_WORDS + 2} words, at most {MAX_WORDS}"]
    assert rules(f"- One {words}\n- Another {words}\n\nThird {words}") == []
    assert rules(f"One\n{words}\n[a link](where/it%20leads.md).") == [f"{MAX_WORDS + 2} words, at most {MAX_WORDS}"]


@pytest.mark.parametrize(
    "sentence", ["It waits for so long.", "At most so many peers join.", "The peer begins anew.", "It lacks a chunk."]
)
def test_banned_words_are_found(sentence: str):
    assert len(rules(sentence)) == 1


@pytest.mark.parametrize(
    "sentence",
    ["There are so many peers that a round takes minutes.", "They can be told apart.", "It was not heard from.",
     "A `sheet` is a field."],
)  # fmt: skip
def test_the_ordinary_meaning_of_a_banned_word_passes(sentence: str):
    assert rules(sentence) == []


MODULE = '''"""A module. What it holds is here."""

URL = "http://host/#fragment"  # a comment. Who reads it knows.
LIMIT = 1
"""Where it ends."""

# Comment lines
# of one text.
# fmt: skip
class A:
    """A class."""

    @property
    def size(self) -> int:
        """The size in bytes."""

    def first(self) -> int:
        """The first one.

        The second paragraph may open as it likes.
        """
        text = "# no comment"
        """Why this is so."""

def test_x():
    """A test states its promise."""
'''


def test_docstrings_attribute_docstrings_and_comments_are_read(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    found = [(f.line, f.rule.split(":")[0], f.sentence) for f in check(path)]
    assert found == [
        (1, "opens with a free relative", "What it holds is here."),
        (3, "opens with a free relative", "Who reads it knows."),
        (5, "opens with a free relative", "Where it ends."),
        (18, "a function opens with a verb", "The first one."),
    ]
    texts = shown(of_python(MODULE))
    assert "Comment lines of one text." in texts
    assert not any("no comment" in t or "fragment" in t or "fmt" in t for t in texts)


MESSAGES = '''"""A module."""

def f():
    """Return nothing."""
    log.info("the peer begins %s anew", "anew")
    told = values["told"]
    raise Failed(
        f"peer {told} lacks "
        f"{told.decode()} here"
    )
    text = "`the sheet` of the run"
'''


def test_the_words_of_messages_are_checked_and_nothing_else_of_them(tmp_path: Path):
    (path := tmp_path / "module.py").write_text(MESSAGES)
    found = [(f.line, f.rule.split(":")[0], f.sentence) for f in check(path)]
    assert found == [(5, "'anew'", "the peer begins %s anew"), (8, "'lacks'", "peer X lacks X here")]
    (tmp_path / "tests").mkdir()
    assert check(path.rename(tmp_path / "tests" / "module.py")) == []


def test_literal_blocks_of_a_docstring_are_left_out():
    text = '"""A module.\n\n    cairn join INVITE    what it does\n\n- An item\n  of two lines.\n\n\\b\nWhat is.\n"""\n'
    assert shown(of_python(text)) == ["A module.", "An item of two lines."]


def test_comments_of_proto_files_are_read():
    text = "// A message\n// of two lines.\nmessage A {\n  int32 a = 1;  // What it is.\n}\n"
    assert shown(of_proto(text)) == ["A message of two lines.", "What it is."]


def test_generated_files_are_passed_over_and_findings_end_with_their_number(tmp_path: Path, capsys):
    (tmp_path / "a_pb2.py").write_text('"""What it is."""')
    (tmp_path / "a.md").write_text("What it is.\n")
    assert [p.name for p in files([tmp_path])] == ["a.md"]
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(Finding(str(tmp_path / "a.md"), 1, "opens with a free relative", "What it is."))
    assert lines[-1] == "1 findings: 1 x opens with a free relative"
    (tmp_path / "a.md").write_text("It is a page.\n")
    assert main([str(tmp_path)]) == 0
