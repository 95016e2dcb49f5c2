"""The page of commands is what the commands say, and the list of commands too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
import pytest

from traceanalyzer import cli

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = click.Context(cli.main)


def test_generated_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docs)
    stale = {page.name: docs.difference(page, wanted) for page, wanted in docs.pages().items()}
    assert {"tables.md", "cli.md", "expect.md"} <= stale.keys()
    assert {name: text for name, text in stale.items() if text} == {}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    command = cli.main.get_command(CONTEXT, name)
    assert command is not None
    assert command.name == name
    assert (command.help or "").splitlines()[0] == cli.COMMANDS[name][1]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_has_help(name: str) -> None:
    command = cli.main.get_command(CONTEXT, name)
    assert command is not None
    silent = [p.name for p in command.params if isinstance(p, click.Option) and not p.help and p.name != "form"]
    assert silent == []
