"""Ids of models on a hub."""

import pytest

from baton_hub.model_id import HubModel, hub_model


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main"),
        ("meta-llama/Llama-3.1-8B@v1.0", "meta-llama/Llama-3.1-8B", "v1.0"),
        ("a/b@refs/pr/1", "a/b", "refs/pr/1"),
        ("a/b@" + "0" * 40, "a/b", "0" * 40),
    ],
)
def test_ids_with_and_without_a_revision(text: str, repo: str, revision: str) -> None:
    assert HubModel.parse(text) == HubModel(repo, revision)
    assert HubModel.parse(text).pinned == (revision == "0" * 40)


@pytest.mark.parametrize(
    "text",
    [
        *("gpt2", "", "/", "a/", "/b", "a/b/c", "../b", "a/..", "./b", "-a/b", "a/b.git", "a--b/c", "a/b c", "ä/b"),
        *(
            "a/b@",
            "a/b@../x",
            "a/b@-x",
            "a/b@x/../../y",
            "a/b@x//y",
            "a/b@/x",
            "a/b@x\n",
            "a/" + "b" * 96,
            "a/b@" + "c" * 256,
        ),
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not (the id of a model|a revision)"):
        HubModel.parse(text)


def test_a_folder_wins_over_an_id(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_model("acme/tiny") == HubModel("acme/tiny")
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert hub_model("acme/tiny") is None
    assert hub_model("/no/such/folder") is None
    assert hub_model("./acme/other") is None
