"""The quickstart pair: preparation, merging, text. No download; tiny made-up weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.quickstart import adapter, pair, text
from cluster.quickstart.adapter import KEPT_LAYERS, LINEARS, LORA_RANK, NORMS

WIDTH = 4


class Words:
    """Counts words as tokens and renders messages in ChatML, one word per mark."""

    def __call__(self, content: str) -> Words:
        self.input_ids = content.split(" ")
        return self

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        turns = [f"<start> {turn['role']} {turn['content']} <end>" for turn in messages]
        return " ".join(turns + ["<start> assistant"] * add_generation_prompt)


def tiny_large() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {
        "model.embed_tokens.weight": torch.randn(8, WIDTH),
        "model.norm.weight": torch.ones(WIDTH),
    }
    for layer in range(30):
        for name in LINEARS:
            state[f"model.layers.{layer}.{name}.weight"] = torch.full((WIDTH, WIDTH), float(layer))
        for name in NORMS:
            state[f"model.layers.{layer}.{name}"] = torch.ones(WIDTH)
    return {name: weight.to(torch.bfloat16) for name, weight in state.items()}


def tiny_adapter() -> dict[str, torch.Tensor]:
    state = {"norm.weight": torch.full((WIDTH,), 3.0)}
    for layer in range(len(KEPT_LAYERS)):
        for name in LINEARS:
            state[f"layers.{layer}.{name}.lora_a"] = torch.ones(2, WIDTH)
            state[f"layers.{layer}.{name}.lora_b"] = torch.ones(WIDTH, 2)
        for name in NORMS:
            state[f"layers.{layer}.{name}"] = torch.full((WIDTH,), 2.0)
    return {name: weight.to(torch.bfloat16) for name, weight in state.items()}


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A home whose large model is written by the test; and the log of what was made."""
    made: list[str] = []
    adapter_file = tmp_path / "adapter.safetensors"
    save_file(tiny_adapter(), adapter_file)

    def write_large(models: Path, folder: Path, advance: object) -> dict[str, str]:
        made.append("large")
        save_file(tiny_large(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 30}))
        (folder / "tokenizer.json").write_text("{}")
        return {"source": "test"}

    def write_small(large: Path, file: Path, out: Path) -> None:
        made.append("small")
        adapter.write_small(large, file, out)

    monkeypatch.setattr(pair, "ADAPTER_FILE", adapter_file)
    monkeypatch.setattr(pair, "_write_large", write_large)
    monkeypatch.setattr(pair, "write_small", write_small)
    return tmp_path / "home", made


def test_the_small_model_is_the_kept_layers_plus_the_product_of_the_factors() -> None:
    merged = adapter.merge_weights(tiny_large(), tiny_adapter())
    for to, source in enumerate(KEPT_LAYERS):
        expected = torch.full((WIDTH, WIDTH), float(source) + 2).to(torch.bfloat16)
        assert torch.equal(merged[f"model.layers.{to}.mlp.up_proj.weight"], expected)
        assert merged[f"model.layers.{to}.input_layernorm.weight"].tolist() == [2.0] * WIDTH
    assert merged["model.norm.weight"].tolist() == [3.0] * WIDTH
    assert len(merged) == 2 + 15 * (len(LINEARS) + len(NORMS))


def test_the_shipped_adapter_names_every_weight_of_the_kept_layers_at_rank_32() -> None:
    weights = load_file(adapter.ADAPTER_FILE)
    expected = {"norm.weight"}
    for layer in range(len(KEPT_LAYERS)):
        expected |= {f"layers.{layer}.{name}.lora_{side}" for name in LINEARS for side in "ab"}
        expected |= {f"layers.{layer}.{name}" for name in NORMS}
    assert set(weights) == expected
    assert weights["layers.14.mlp.down_proj.lora_a"].shape == (LORA_RANK, 1536)
    assert weights["layers.14.mlp.down_proj.lora_b"].shape == (576, LORA_RANK)
    assert adapter.ADAPTER_FILE.stat().st_size <= 12_000_000


def test_a_second_preparation_makes_nothing(prepared: tuple[Path, list[str]]) -> None:
    home, made = prepared
    paths = pair.prepare_pair(home)
    assert made == ["large", "small"]
    assert json.loads((paths.small / "config.json").read_text())["num_hidden_layers"] == 15
    assert (paths.small / "tokenizer.json").exists()
    assert pair.prepare_pair(home) == paths
    assert made == ["large", "small"]


def test_a_new_adapter_makes_the_small_model_anew(prepared: tuple[Path, list[str]]) -> None:
    home, made = prepared
    paths = pair.prepare_pair(home)
    changed = tiny_adapter() | {"norm.weight": torch.full((WIDTH,), 5.0, dtype=torch.bfloat16)}
    save_file(changed, pair.ADAPTER_FILE)
    pair.prepare_pair(home)
    assert made == ["large", "small", "small"]
    weights = load_file(paths.small / "model.safetensors")
    assert weights["model.norm.weight"].tolist() == [5.0] * WIDTH
    assert sorted(path.name for path in paths.small.parent.iterdir()) == [
        "large",
        "prepare.lock",
        "small",
    ]


def test_what_a_killed_preparation_left_is_thrown_away(
    prepared: tuple[Path, list[str]],
) -> None:
    home, made = prepared
    unfinished = home / "models" / "large.partial"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    (home / "models" / "small").mkdir()
    paths = pair.prepare_pair(home)
    assert made == ["large", "small"]
    assert not unfinished.exists()
    assert len(load_file(paths.small / "model.safetensors")) == 137


def test_a_ready_pair_is_returned_without_importing_torch(
    prepared: tuple[Path, list[str]],
) -> None:
    home, _ = prepared
    pair.prepare_pair(home)
    code = (
        "import sys; from pathlib import Path; from cluster.quickstart import pair, text;"
        f"pair.ADAPTER_FILE = Path({str(pair.ADAPTER_FILE)!r});"
        f"pair.prepare_pair(Path({str(home)!r}));"
        "text.heldout_texts();"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_home_variable_moves_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pair.HOME_VARIABLE, "/somewhere/else")
    assert pair.default_home() == Path("/somewhere/else")


def test_calibration_and_heldout_text_are_large_enough_and_share_nothing() -> None:
    calibration, heldout = text.calibration_texts(), text.heldout_texts()
    assert not set(calibration) & set(heldout)
    # English takes over four characters a token with this tokenizer, code and lists less.
    assert sum(map(len, calibration)) > 150_000 * 4.6
    assert sum(map(len, heldout)) > 20_000 * 4.6
    assert any(piece.startswith("<|im_start|>system\n") for piece in heldout)
    assert text.SAMPLED_FILE.stat().st_size <= 1_500_000


@pytest.mark.parametrize("target_tokens", [500, 2000, 6000])
def test_a_long_conversation_has_about_the_asked_length_and_ends_with_a_question(
    target_tokens: int,
) -> None:
    words = Words()
    messages = text.long_conversation_messages(target_tokens, words, seed=3)  # type: ignore[arg-type]
    rendered = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert target_tokens - 60 <= len(rendered.split(" ")) <= target_tokens
    assert [turn["role"] for turn in messages[:2]] == ["system", "user"]
    assert all(a["role"] != b["role"] for a, b in zip(messages, messages[1:], strict=False))
    assert messages[-1]["role"] == "user"
    assert messages[-1]["content"].endswith("?") or messages[-1]["content"].endswith(".")


def test_conversations_of_two_seeds_differ_from_the_first_words_on() -> None:
    first, second = (
        text.long_conversation_messages(500, Words(), seed)  # type: ignore[arg-type]
        for seed in (1, 2)
    )
    assert first[0]["content"].split()[:2] != second[0]["content"].split()[:2]
    assert first[1] != second[1]
    assert first == text.long_conversation_messages(500, Words(), 1)  # type: ignore[arg-type]


def test_a_conversation_too_short_to_hold_a_question_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for 128"):
        text.long_conversation_messages(100, Words(), 0)  # type: ignore[arg-type]
