"""The command line, run in this process on a tiny checkpoint."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import deinfer_jax
from deinfer_jax import Completion, Timing, cli
from tests import tiny

COMMANDS = ("generate", "decompose", "inspect", "perplexity", "plan", "crosscheck", "doctor")
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of one token a word: w3 … w159 and the roles."""
    pytest.importorskip("torch")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    tiny.make("gqa", directory)
    words = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{i}" for i in range(5, 160))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Completion]:
    with deinfer_jax.load(model) as llm:
        prompts: list[Any] = ["w7 w8", "w9", [{"role": "user", "content": "w7"}]]
        done = deinfer_jax.generate(llm, prompts, max_new_tokens=5)
    return dict(zip(("w7 w8", "w9", "chat"), done, strict=True))


def generate(model: Path, *arguments: str) -> int:
    return cli.main(["generate", str(model), "--max-new-tokens", "5", *arguments])


class TestGenerate:
    def test_prompt_and_continuation(
        self, model: Path, expected, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert generate(model, "w7 w8") == 0
        assert "w7 w8" + expected["w7 w8"].text in capsys.readouterr().out

    def test_several_prompts(
        self, model: Path, expected, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert generate(model, "w7 w8", "w9") == 0
        out = capsys.readouterr().out
        assert out.index(expected["w7 w8"].text) < out.index(expected["w9"].text)

    def test_chat(self, model: Path, expected, capsys: pytest.CaptureFixture[str]) -> None:
        assert generate(model, "--chat", "w7") == 0
        assert capsys.readouterr().out == f"> w7\n{expected['chat'].text}\n\n"

    def test_json(self, model: Path, expected, capsys: pytest.CaptureFixture[str]) -> None:
        assert generate(model, "--json", "w7 w8", "w9") == 0
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [record["prompt"] for record in records] == ["w7 w8", "w9"]
        for record in records:
            done = expected[record["prompt"]]
            assert record["text"] == done.text
            assert record["token_ids"] == list(done.token_ids)
            assert record["finish_reason"] == done.finish_reason
            assert record["error"] is None
            assert record["ttft_s"] > 0

    def test_sampling_options_are_passed_on(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, Any] = {}

        def spy(llm: Any, prompts: Any, **options: Any) -> list[Completion]:
            seen.update(options, max_batch=llm.max_batch, max_context=llm.max_context)
            return []

        monkeypatch.setattr(deinfer_jax, "generate", spy)
        options = "--temperature 0.5 --top-k 3 --top-p 0.75 --min-p 0.25 --seed 9 --ignore-eos"
        options += " --stop-token-ids 7 --stop-token-ids 9 --n 2 --stop w3 --stop w4 --logprobs 1"
        with pytest.raises(ValueError, match="zip"):  # the spy has no completions to print
            args = cli._parser().parse_args(
                ["generate", str(model), "w7", *options.split()]
                + ["--max-batch", "3", "--max-context", "64", "--max-new-tokens", "6"]
            )
            args.run(args)
        assert seen == dict(
            max_new_tokens=6,
            temperature=0.5,
            top_k=3,
            top_p=0.75,
            min_p=0.25,
            seed=9,
            ignore_eos=True,
            stop_token_ids=[7, 9],
            n=2,
            stop=["w3", "w4"],
            logprobs=1,
            max_batch=3,
            max_context=64,
        )

    def test_loading_options_are_passed_on(
        self, model: Path, expected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, Any] = {}
        load = deinfer_jax.load

        def spy(path: Any, **options: Any) -> deinfer_jax.LLM:
            seen.update(options, path=path)
            return load(path, **options)

        monkeypatch.setattr(deinfer_jax, "load", spy)
        options = "--dtype float32 --max-batch 3 --max-context 64 --cache-bytes 200000"
        options += " --page-size 32 --prefill-chunk 16 --decode-steps 2 --implementation reference"
        options += " --kv-cache full --strategy sharded --tensor-parallel 2"
        assert generate(model, "w7 w8", *options.split()) == 0
        assert seen == dict(
            path=str(model),
            dtype="float32",
            max_batch=3,
            max_context=64,
            cache_bytes=200000,
            page_size=32,
            prefill_chunk=16,
            decode_steps=2,
            implementation="reference",
            kv_cache="full",
            strategy="sharded",
            tensor_parallel=2,
        )

    def test_stop_token_ids(
        self, model: Path, expected, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ids = expected["w7 w8"].token_ids
        assert generate(model, "w7 w8", "--json", "--stop-token-ids", str(ids[1])) == 0
        record = json.loads(capsys.readouterr().out)
        count = ids.index(ids[1]) + 1
        assert (record["token_ids"], record["finish_reason"]) == (list(ids[:count]), "stop")

    def test_a_failed_request(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        failed = Completion(
            prompt_token_ids=(7,),
            text="",
            token_ids=(),
            finish_reason="error",
            logprobs=None,
            error="the logits are not finite",
            timing=Timing(ttft_s=None, itl_s=None),
        )
        monkeypatch.setattr(deinfer_jax, "generate", lambda *_, **__: [failed])
        assert generate(model, "w7") == 1
        captured = capsys.readouterr()
        assert "the logits are not finite" in captured.err
        assert "not finite" not in captured.out


# what is wrong: (arguments, message)
BAD = {
    "temperature": (["--temperature", "-1", "w7"], "temperature: expected a float32 number >= 0"),
    "top-p": (["--top-p", "0", "w7"], "top_p"),
    "new tokens": (["--max-new-tokens", "0", "w7"], "max_new_tokens"),
    "seed": (["--seed", "-1", "w7"], "seed"),
    "batch": (["--max-batch", "0", "w7"], "max_batch"),
    "context": (["--max-context", "1000", "w7"], "max_context: expected 2 to 96"),
    "context of one": (["--max-context", "1", "w7"], "max_context: expected 2 to 96"),
    "page size": (["--page-size", "17", "w7"], "page_size: expected one of (16, 32, 64, 128)"),
    "prefill chunk": (["--prefill-chunk", "0", "w7"], "prefill_chunk: expected a positive"),
    "decode steps": (["--decode-steps", "0", "w7"], "decode_steps: expected a positive"),
    "implementation": (["--implementation", "cuda", "w7"], "implementation: expected 'reference'"),
    "missing implementation": (["--implementation", "mosaic_gpu", "w7"], "mosaic_gpu"),
    "stop token": (["w7", "--stop-token-ids", "160"], "stop_token_ids: expected ids from 0 to 159"),
    "cache": (["--cache-bytes", "10", "w7"], "cache_bytes"),
    "long prompt": (
        ["w7", "w7 " * 95],
        "prompt 1: 95 + 5 new tokens, expected at most max_context = 96 together",
    ),
    "empty prompt": (["w7", ""], "prompt 1: expected text, got an empty string"),
}


class TestErrors:
    @pytest.mark.parametrize("name", BAD)
    def test_bad_request(self, model: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        arguments, message = BAD[name]
        assert generate(model, *arguments) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("deinfer generate: ") and message in captured.err
        assert captured.out == ""

    @pytest.mark.parametrize("arguments", [["generate", "nowhere", "x"], ["inspect", "nowhere"]])
    def test_no_such_model(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(arguments) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"deinfer {arguments[0]}: nowhere")
        assert captured.err.count("\n") == 1 and captured.out == ""

    def test_an_error_of_the_device(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import jax

        def fail(*_: Any, **__: Any) -> None:
            raise jax.errors.JaxRuntimeError("INTERNAL: planted")

        monkeypatch.setattr(deinfer_jax, "generate", fail)
        assert generate(model, "w7") == 1
        assert capsys.readouterr().err == "deinfer generate: INTERNAL: planted\n"

    def test_a_model_that_may_not_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(path: object) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(deinfer_jax, "inspect", refuse)
        assert cli.main(["inspect", str(tmp_path)]) == 1
        assert "Permission denied" in capsys.readouterr().err

    def test_a_model_without_chat_template(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiny.make("gqa", tmp_path)  # without a tokenizer, too
        assert generate(tmp_path, "--chat", "w7") == 1
        assert "no tokenizer" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["train"],
            ["generate"],
            ["generate", "model"],
            ["generate", "model", "x", "--tempreature", "1"],
            ["generate", "model", "x", "--dtype", "int8"],
            ["generate", "model", "x", "--page-size", "big"],
            ["generate", "model", "x", "--stop-token-ids"],
            ["inspect"],
        ],
        ids=" ".join,
    )
    def test_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 2
        captured = capsys.readouterr()
        assert "usage: deinfer" in captured.err and captured.out == ""


class TestInspect:
    def test_describes_the_checkpoint(
        self, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["inspect", str(model)]) == 0
        rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
        assert rows["path"] == str(model)
        assert rows["family"] == "llama"
        assert rows["layers"].startswith("2 of width 48, feed-forward 80")
        assert rows["attention"] == "6 query and 2 kv heads of width 8"
        assert rows["context"] == "96 tokens"
        assert rows["words"] == "160, separate head"

    def test_counts_parameters(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main(["inspect", str(model)])
        layer = 2 * 48 + 48 * (48 + 16 + 16 + 48) + 3 * 48 * 80
        assert f"{2 * 160 * 48 + 48 + 2 * layer:,}" in capsys.readouterr().out

    def test_cache_bytes(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main(["inspect", str(model)])
        assert "64 elements a token (128 bytes in bfloat16)" in capsys.readouterr().out


class TestPlan:
    def test_table_and_json(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "plan.json"
        options = ["--devices", "2", "--link", "pcie", "--context", "64", "--json", str(out)]
        assert cli.main(["plan", str(model), *options]) == 0
        text = capsys.readouterr().out
        found = json.loads(out.read_text())
        assert found["devices"] == 2 and found["choice"]["strategy"] in text

    def test_nothing_fits(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["plan", str(model), "--devices", "2", "--memory", "1e-6"]) == 1
        assert capsys.readouterr().out


class TestDoctor:
    def test_versions_devices_and_verdict(self, capsys: pytest.CaptureFixture[str]) -> None:
        import jax

        assert cli.main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.split() == ["jax", jax.__version__] for line in lines)
        assert sum(line.startswith("device") for line in lines) == len(jax.devices())
        assert any(line.startswith("XLA_FLAGS") for line in lines)
        assert lines[-1].startswith("verdict: ready")

    def test_no_usable_device(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import jax

        def none() -> None:
            raise RuntimeError("no backend")

        monkeypatch.setattr(jax, "devices", none)
        assert cli.main(["doctor"]) == 1
        assert "verdict: no device can be used: no backend" in capsys.readouterr().out


class TestHelp:
    def text(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            cli.main([*arguments, "--help"])
        assert left.value.code == 0
        return capsys.readouterr().out

    def test_lists_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.text(capsys)
        assert all(command in text for command in COMMANDS)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_shows_an_example_that_parses(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, _, example = self.text(capsys, command).partition("example: ")
        program, *arguments = shlex.split(example)
        assert program == "deinfer"
        assert cli._parser().parse_args(arguments).command == command
