"""All models of a run: windows, token ids, tied tensors, reward models, adapters, templates."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness.byte_model import APPENDING, make_byte_model
from services.lib.model_files.model_folder import check_model_folder, check_same_tokens
from services.scoring.scorers.reward_model import own_text
from tests.lib.trainer.support import trainer_config
from tests.suites.field.kind import Kind
from tests.suites.field.tiny_models import VOCABULARY, make_config, make_model
from tests.suites.models.kinds import WINDOWED, compare
from tests.suites.models.kinds import Kind as ModelKind
from trainer.model.lora import adapter_settings, add_adapter, is_adapter, published_name
from trainer.publish.weight_folder import write_folder

_TOLERANCE = 1e-4
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|end|>"
    "{% else %}{{ raise_exception('no system message') }}{% endif %}{% endfor %}"
)
STRIPPING = (
    "{% for m in messages %}## {{ m.role }}: {{ m.content | trim }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}## assistant: {% endif %}"
)
_TEMPLATES = {"appending": APPENDING, "chatml": CHATML, "inst": INST, "stripping": STRIPPING}


@dataclass(frozen=True)
class Tokens:
    """A second model folder beside the policy's, and whether it may get the policy's token ids."""

    swapped: tuple[int, int] | None = None
    """Ids whose tokens are exchanged."""
    vocab_size: int = VOCABULARY
    policy_vocab_size: int = VOCABULARY

    @property
    def is_right(self) -> bool:
        """By the meaning of each id."""
        same = self.swapped is None or self.swapped[0] == self.swapped[1]
        return same and self.vocab_size >= self.policy_vocab_size


def _write_config(folder: Path, vocab_size: int) -> None:
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": vocab_size})
    )


def _check_tokens(given: Tokens) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        policy, other = (make_byte_model(Path(scratch) / name) for name in ("policy", "other"))
        _write_config(policy, given.policy_vocab_size)
        _write_config(other, given.vocab_size)
        if given.swapped is not None:
            file = other / "tokenizer.json"
            content = json.loads(file.read_text())
            ids = content["model"]["vocab"]
            names = {number: text for text, number in ids.items()}
            first, second = (names[number] for number in given.swapped)
            ids[first], ids[second] = ids[second], ids[first]
            file.write_text(json.dumps(content))
        try:
            check_same_tokens(policy, other, "reference")
        except ValueError as error:
            assert not given.is_right, error
            assert "reference" in str(error)
            assert str(other) in str(error)
        else:
            assert given.is_right


@dataclass(frozen=True)
class Tied:
    """Weights of a folder: what the configuration says of them, and what the file has."""

    model_type: str
    tied: bool
    head: str
    """"same", "other" in one number, or "none" in the file."""


def _check_tied(given: Tied) -> None:
    """Refused if the two contradict each other; else both loads are transformers' own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_byte_model(Path(scratch) / "model")
        model: Any = make_model(make_config(given.model_type, tie_word_embeddings=given.tied))
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        name = next(n for n, p in model.named_modules() if p is model.get_output_embeddings())
        rows = model.get_output_embeddings().weight.detach().clone()
        tensors.pop(f"{name}.weight", None)
        if given.head != "none":
            rows[1, 1] += 1.0 if given.head == "other" else 0.0
            tensors[f"{name}.weight"] = rows
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        try:
            check_model_folder(folder)
        except ValueError as error:
            assert given.tied, error
            assert given.head == "other", error
            assert "tie_word_embeddings" in str(error)
        else:
            assert not (given.tied and given.head == "other")


@dataclass(frozen=True)
class Judged:
    """A conversation that a reward model of another chat template reads."""

    policy: str
    model: str
    contents: tuple[str, ...]
    system: str | None = None
    is_cut: bool = False
    """Whether the last answer lacks its end."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the environment and the policy wrote them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        roles = ("user", "assistant") * len(self.contents)
        pairs = zip(roles, self.contents, strict=False)
        return [*system, *({"role": role, "content": content} for role, content in pairs)]


def _check_judged(given: Judged) -> None:
    """The right ids are those of the reward model's own tokenizer, of the whole conversation."""
    with tempfile.TemporaryDirectory() as scratch:
        policy, model = (
            make_byte_model(Path(scratch) / name, _TEMPLATES[template])
            for name, template in (("policy", given.policy), ("model", given.model))
        )
        loaded: list[Any] = [AutoTokenizer.from_pretrained(folder) for folder in (policy, model)]
        theirs, own = loaded
        ids = theirs.apply_chat_template(given.messages, return_dict=True)["input_ids"]
        if given.policy != "stripping":
            ids = ids[:-1] if given.is_cut and given.policy in ("appending", "inst") else ids
        reader = own_text(policy, model)
        if given.policy == given.model:
            assert reader is None
            return
        assert reader is not None
        found = reader.own_ids(np.array(ids, np.int32)).tolist()
        right = own.apply_chat_template(given.messages, return_dict=True)["input_ids"]
        assert found == right, own.decode(found)


def _check_exported(templates: Mapping[str, str]) -> None:
    """transformers reads the same templates from the exported folder."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target = make_byte_model(Path(scratch) / "model"), Path(scratch) / "out"
        tokenizer = AutoTokenizer.from_pretrained(source)
        for file in source.glob("chat_template*"):
            file.unlink()
        tokenizer.chat_template = dict(templates)
        tokenizer.save_pretrained(source)
        before = AutoTokenizer.from_pretrained(source).chat_template
        write_folder(target, source, {"w": torch.zeros(1)}, durable=False)
        assert AutoTokenizer.from_pretrained(target).chat_template == before


@dataclass(frozen=True)
class Opened:
    """An adapter folder of an architecture, opened by peft."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    targets: Sequence[str] = ()


@torch.no_grad()
def _check_opened(given: Opened) -> None:
    """Refused when adapters are made, or peft computes what the trainer does."""
    model: Any = make_model(make_config(given.model_type, **given.settings))
    with tempfile.TemporaryDirectory() as scratch:
        base = make_byte_model(Path(scratch) / "model")
        model.save_pretrained(base)
        config = trainer_config(
            run_id="r",
            model=base,
            checkpoint__folder="c",
            lora__rank=2,
            lora__targets=tuple(given.targets),
            publish__content="adapter",
        )
        try:
            add_adapter(model, config)
        except ValueError as error:
            assert "peft opens it as another model" in str(error), error
            return
        torch.manual_seed(1)
        adapters = {n: p for n, p in model.named_parameters() if is_adapter(n)}
        for parameter in adapters.values():
            parameter.normal_(0, 0.2)
        published = {published_name(name): each.detach() for name, each in adapters.items()}
        folder = Path(scratch) / "adapter"
        write_folder(folder, base, published, adapter_settings(config), durable=False)
        with warnings.catch_warnings(action="ignore"):
            opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        ids = torch.arange(3, 20)[None]
        pair = [each(ids, use_cache=False).logits.log_softmax(-1) for each in (model, opened)]
        assert (pair[0] - pair[1]).abs().max() <= _TOLERANCE


def _check_windows(model_type: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        kind = ModelKind(model_type, WINDOWED.get(model_type, {}))
        assert not compare(kind, Path(scratch) / "model").silent


_words = st.text(st.sampled_from("abc xyz.?\n"), min_size=1, max_size=12).map(str.strip)
_contents = st.lists(_words.filter(bool), min_size=2, max_size=6).map(tuple)
_judged = st.builds(
    Judged,
    st.sampled_from(["appending", "chatml", "inst"]),
    st.sampled_from(["appending", "chatml", "inst", "stripping"]),
    _contents.filter(lambda each: len(each) % 2 == 0),
).flatmap(
    lambda each: st.builds(
        Judged,
        st.just(each.policy),
        st.just(each.model),
        st.just(each.contents),
        st.none() if "inst" in (each.policy, each.model) else st.none() | _words.filter(bool),
        st.booleans(),
    )
)
_NAMES = st.sampled_from(["default", "tool_use", "rag", "thinking"])

KINDS = (
    Kind(
        name="windows of model kinds",
        check=_check_windows,
        examples=["phimoe", "olmoe", "doge", "gpt_neo", "rwkv", "bart", "roformer"],
        generated=st.sampled_from(sorted(WINDOWED)),
        short=1,
        long=15,
    ),
    Kind(
        name="token ids of other models",
        check=_check_tokens,
        examples=[
            Tokens(),
            Tokens(swapped=(65, 66)),
            Tokens(vocab_size=VOCABULARY + 8),
            Tokens(policy_vocab_size=VOCABULARY + 8),
        ],
        generated=st.builds(
            Tokens,
            swapped=st.none() | st.tuples(st.integers(0, 255), st.integers(0, 255)),
            vocab_size=st.integers(VOCABULARY, VOCABULARY + 3),
            policy_vocab_size=st.integers(VOCABULARY, VOCABULARY + 3),
        ),
        short=5,
        long=200,
    ),
    Kind(
        name="tied flags",
        check=_check_tied,
        examples=[Tied(model_type, True, "other") for model_type in ("llama", "qwen3", "gpt_neox")],
        generated=st.builds(
            Tied,
            st.sampled_from(["llama", "qwen2", "qwen3", "gpt_neox", "gpt2", "mixtral", "phi3"]),
            st.booleans(),
            st.sampled_from(["same", "other"]),
        ),
        short=5,
        long=100,
    ),
    Kind(
        name="text for reward models",
        check=_check_judged,
        examples=[
            Judged("chatml", "inst", ("2 + 2?", "4")),
            Judged("inst", "chatml", ("a", "b", "c", "d"), is_cut=True),
            Judged("chatml", "appending", ("a", "b"), system="Be short."),
            Judged("chatml", "chatml", ("a", "b")),
        ],
        generated=_judged,
        short=5,
        long=300,
    ),
    Kind(
        name="named chat templates",
        check=_check_exported,
        examples=[{"default": "D", "tool_use": "T"}, {"tool_use": "T", "rag": "R"}],
        generated=st.dictionaries(_NAMES, st.sampled_from(["a", "{{ messages }}"]), min_size=1),
        short=5,
        long=60,
    ),
    Kind(
        name="adapter folders in peft",
        check=_check_opened,
        examples=[
            Opened("deepseek_v3"),
            Opened("qwen2_moe"),
            Opened("qwen3_moe", {"mlp_only_layers": [0]}),
            Opened("llama"),
        ],
        generated=st.builds(
            Opened,
            st.sampled_from(
                ["llama", "mixtral", "qwen2_moe", "glm4_moe", "olmoe", "granitemoe", "gemma2"]
            ),
            st.just({}),
            st.sampled_from([(), ("o_proj",)]),
        ),
        short=2,
        long=30,
    ),
)
