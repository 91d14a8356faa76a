"""The quickstart pair: preparation, text and distillation. No download; made-up weights."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.quickstart import adapter, distill_data, llama, pair, text, trainer
from cluster.quickstart.adapter import KEPT_LAYERS, LINEARS, LORA_RANK, NORMS
from cluster.quickstart.training_text import page_text

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


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A random two-layer Llama with the pair's shapes, and the folder it is saved in."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=llama.HIDDEN,
        intermediate_size=llama.WIDTH,
        num_hidden_layers=2,
        num_attention_heads=llama.HEADS,
        num_key_value_heads=llama.KV_HEADS,
        head_dim=llama.HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": llama.ROPE_THETA},
        rms_norm_eps=llama.NORM_EPS,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    folder = tmp_path_factory.mktemp("two-layers")
    model.save_pretrained(folder)
    return model, folder


@torch.no_grad()
def test_the_lean_forward_pass_agrees_with_transformers(
    two_layers: tuple[LlamaForCausalLM, Path],
) -> None:
    model, folder = two_layers
    embed, layers, norm_E = llama.load_large(folder)
    tokens_NT = torch.randint(0, 64, (2, 20))
    first, last = llama.Forward(fused=False)(embed, layers, tokens_NT, [0, 1])
    logits = (llama.norm(last, norm_E) @ embed.T).view(2, 20, -1).float()
    expected = model(tokens_NT, output_hidden_states=True)
    states = expected.hidden_states
    assert states is not None
    torch.testing.assert_close(first.view(2, 20, -1), states[1], atol=0.01, rtol=0.05)
    torch.testing.assert_close(logits, expected.logits.float(), atol=0.02, rtol=0.05)


@torch.no_grad()
def test_decoding_token_by_token_agrees_with_the_whole_pass(
    two_layers: tuple[LlamaForCausalLM, Path],
) -> None:
    embed, layers, _ = llama.load_large(two_layers[1])
    tokens_NT = torch.randint(0, 64, (3, 12))
    (whole,) = llama.Forward(fused=False)(embed, layers, tokens_NT, [1])
    k, v = torch.zeros(2, 2, 3, llama.KV_HEADS, 12, llama.HEAD_DIM, dtype=torch.bfloat16)
    for at in range(12):
        state_NE = llama.decode(embed, layers, tokens_NT[:, at], k, v, at)
        expected = whole.view(3, 12, -1)[:, at]
        torch.testing.assert_close(state_NE, expected, atol=0.02, rtol=0.05)


def test_gradients_of_merged_factors_are_those_of_the_plain_formula() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 6, dtype=torch.float64)
    a = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    b1 = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    b2 = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    ask = torch.randn(5, 7, dtype=torch.float64)
    merged = weight + torch.cat([b1 @ a[:2], b2 @ a[2:]])
    plain = torch.autograd.grad((x @ merged.T * ask).sum(), (x, a, b1, b2))
    out = llama.MergedLora.apply(x, merged.detach(), a, b1, b2)
    for mine, expected in zip(
        torch.autograd.grad((out * ask).sum(), (x, a, b1, b2)), plain, strict=True
    ):
        torch.testing.assert_close(mine, expected)


def test_the_head_loss_is_the_divergence_and_has_its_gradient() -> None:
    torch.manual_seed(0)
    embed = torch.randn(50, 16).to(torch.bfloat16)
    large = torch.randn(256, 16).to(torch.bfloat16)
    small = torch.randn(256, 16).to(torch.bfloat16).requires_grad_()
    loss = trainer.HeadKl.apply(small, large, embed)
    (mine,) = torch.autograd.grad(loss, small)
    exact = small.detach().float().requires_grad_()
    expected = F.kl_div(
        F.log_softmax(exact @ embed.T.float(), -1),
        F.log_softmax(large.float() @ embed.T.float(), -1),
        reduction="batchmean",
        log_target=True,
    )
    (gradient,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(loss, expected.detach(), rtol=0.01, atol=0.01)
    assert (mine.float() - gradient).norm() < 0.02 * gradient.norm()


def test_kept_states_of_the_large_model_are_what_was_computed(tmp_path: Path) -> None:
    asked: list[int] = []

    def states(tokens_NT: torch.Tensor) -> torch.Tensor:
        asked.append(len(tokens_NT))
        return tokens_NT[:, :, None, None].expand(-1, -1, 2, 3).to(torch.bfloat16)

    # Room for one row's two positions of 2 x 3 numbers; the other row is computed again.
    cache = distill_data.TeacherCache(tmp_path / "states", states, (2, 3), 2 * 2 * 2 * 3)
    for _ in range(2):
        kept = cache([(1, 2, 3, 4), (5, 6, 7, 8)])
        assert kept[:, 0, 0].tolist() == [2, 4, 6, 8]
        assert kept.shape == (4, 2, 3)
    assert asked == [2, 2]
    assert cache([(1, 2, 3, 4)])[:, 1, 2].tolist() == [2, 4]
    assert asked == [2, 2]


def test_rows_use_each_token_at_most_once_and_batches_are_full() -> None:
    numbers = iter(range(40_000))
    lists = [[next(numbers) for _ in range(length)] for length in (300, 5000, 900, 20, 12_000)]
    rows = distill_data.make_rows(lists, random.Random(0))
    used = [token for row in rows for token in row]
    assert len(used) == len(set(used))
    assert len(used) > 0.7 * sum(map(len, lists))
    for batch in distill_data.batches(rows, random.Random(0)):
        assert sum(map(len, batch)) == distill_data.BATCH_TOKENS
        assert len({len(row) for row in batch}) == 1


def test_page_text_keeps_paragraphs_and_drops_scripts() -> None:
    html = "<head><title>t</title></head><h1>One</h1><script>x()</script><p>two\n three</p>"
    assert page_text(html) == "One\n\ntwo\n three"
