"""Run a model, or one block, and keep intermediate values under the names of stages.py.

Nothing is changed in either model: hooks see the outputs of modules, and while recording the operator that a KDA layer
calls is wrapped, on both sides, by a function that notes what goes in and out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

import openkda
from openkda.integrations.torchtitan import kda as titan_kda
from openkda.integrations.torchtitan.decode import DecodeCache, KDACache
from openkda.integrations.torchtitan.model import KimiLinearBlock, KimiLinearModel
from openkda.parity import stages
from openkda.parity.reference import operator_home

Values = dict[str, Tensor]


@dataclass
class Routing:
    """One layer's choice of experts: scores `[T, E]` fp32 before the bias, experts `[T, k]` chosen."""

    scores: Tensor
    experts: Tensor


@dataclass
class Trace:
    """One forward of one text.

    logits `[T, vocabulary]`; inputs: what each block got, `[1, T, D]`, and after the last block its output;
    values: by layer and stage; routing: by layer, of layers with experts; operator: by layer, arguments of the
    KDA operator.
    """

    logits: Tensor | None = None
    embeddings: Tensor | None = None
    normed: Tensor | None = None
    inputs: list[Tensor] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)
    routing: dict[int, Routing] = field(default_factory=dict)
    operator: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Decoding:
    """A text read in two parts: all but the last n tokens, then one at a time.

    Per layer: mixer inputs and outputs of every call, and the KDA state `[1, H, K, V]` after the first.
    """

    inputs: list[list[Tensor]]
    outputs: list[list[Tensor]]
    states: dict[int, Tensor]


def _keep(values: Values, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        values[name] = (output[0] if isinstance(output, tuple) else output).detach()

    return hook


@contextlib.contextmanager
def _hooks() -> Iterator[list[Any]]:
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def blocks_of(model: KimiLinearModel) -> list[KimiLinearBlock]:
    """The layers of our model, in order."""
    return cast(list[KimiLinearBlock], list(model.layers.values()))


def stages_of(block: KimiLinearBlock) -> tuple[stages.Stage, ...]:
    """The steps of one of our blocks."""
    return stages.stages_of(is_kda=block.mixer_name == "kda", is_moe=block.moe_enabled)


# ---- the reference ---------------------------------------------------------------------------------------------------


def run_reference(model: Any, ours: KimiLinearModel, ids: Tensor) -> Trace:
    """Run transformers' model on ids `[1, T]` and record every stage. Gradients flow where they are enabled."""
    trace = Trace(values=[{} for _ in model.model.layers])
    with _hooks() as handles, _recorded_reference(trace):
        for i, (layer, block) in enumerate(zip(model.model.layers, blocks_of(ours), strict=True)):
            values = trace.values[i]
            handles.append(layer.register_forward_pre_hook(lambda m, args: trace.inputs.append(args[0].detach())))
            for stage in stages_of(block):
                if stage.reference:
                    handles.append(
                        layer.get_submodule(stage.reference).register_forward_hook(_keep(values, stage.name))
                    )
            if block.mixer_name == "attention":
                handles.append(layer.self_attn.o_proj.register_forward_pre_hook(_keep_input(values, stages.ATTENTION)))
            if block.moe_enabled:
                handles.append(layer.mlp.gate.register_forward_hook(_keep_routing(trace, i)))
            handles.append(layer.register_forward_hook(_keep(values, stages.BLOCK.name)))
        kept: Values = {}
        handles.append(model.model.embed_tokens.register_forward_hook(_keep(kept, "embeddings")))
        handles.append(model.model.norm.register_forward_hook(_keep(kept, "normed")))
        trace.logits = model(ids, use_cache=False).logits[0]
    trace.embeddings, trace.normed = kept["embeddings"], kept["normed"]
    trace.inputs.append(trace.values[-1][stages.BLOCK.name])
    return trace


def _keep_input(values: Values, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        values[name] = args[0].detach()

    return hook


def _keep_routing(trace: Trace, layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        logits, _, experts = output
        scores = logits.detach().float().sigmoid()
        trace.routing[layer] = Routing(scores, experts)
        trace.values[layer]["router scores"] = scores

    return hook


@contextlib.contextmanager
def _recorded_reference(trace: Trace) -> Iterator[None]:
    """Note what transformers' KDA layers hand to their chunked operator, layer by layer in the order of the calls."""
    home = operator_home()
    operator = home.chunk_kimi_delta_attention

    def recorded(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        out = operator(query, key, value, g=g, beta=beta, **options)
        i = len(trace.inputs) - 1
        named = {f"{x} after convolution": y for x, y in zip("qkv", (query, key, value), strict=True)}
        trace.values[i] |= {n: v.detach() for n, v in {**named, "log-decay": g, stages.ATTENTION: out[0]}.items()}
        trace.operator[i] = {"q": query.detach(), "k": key.detach(), "v": value.detach(), "g": g.detach()}
        trace.operator[i]["beta"] = beta.detach()
        return out

    home.chunk_kimi_delta_attention = recorded
    try:
        yield
    finally:
        home.chunk_kimi_delta_attention = operator


@torch.no_grad()
def decode_reference(model: Any, ids: Tensor, steps: int) -> Decoding:
    """Read ids `[1, T]` with a cache: T - steps tokens at once, then one at a time."""
    layers = model.model.layers
    out = Decoding([[] for _ in layers], [[] for _ in layers], {})
    with _hooks() as handles:
        for i, layer in enumerate(layers):

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, i: int = i) -> None:
                out.inputs[i].append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
                out.outputs[i].append(output[0] if isinstance(output, tuple) else output)

            handles.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
        cache = model(ids[:, :-steps], use_cache=True).cache
        for i, layer in enumerate(layers):
            if hasattr(layer.self_attn, "forget_gate"):
                out.states[i] = cache.get_recurrent_state(i, state_idx=0).clone()
        for t in range(ids.shape[1] - steps, ids.shape[1]):
            cache = model(ids[:, t : t + 1], cache=cache, use_cache=True).cache
    return out


# ---- our model -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forced(model: KimiLinearModel, experts: dict[int, Tensor] | None) -> Iterator[None]:
    """Send every token to the given experts, by layer `[T, k]`; None leaves the choice to our routers.

    Our router still computes scores and weights itself. It is given, in place of its bias, one that rules out all
    other experts: the bias only enters the choice.
    """
    with _hooks() as handles:
        for i, block in enumerate(blocks_of(model)):
            if experts is not None and block.moe_enabled:
                handles.append(block.moe.router.register_forward_pre_hook(_force(experts[i])))
        yield


def _force(experts_TK: Tensor) -> Callable[..., Any]:
    def hook(router: Any, args: Any) -> Any:
        x_BLD = args[0]
        chosen_BLK = experts_TK.view(*x_BLD.shape[:2], -1)
        ruled_out = torch.full((*x_BLD.shape[:2], router.num_experts), -torch.inf, device=x_BLD.device)
        return x_BLD, ruled_out.scatter(-1, chosen_BLK, 0.0)

    return hook


def run_ours(model: KimiLinearModel, ids: Tensor, positions: Tensor | None = None) -> Trace:
    """Run our model on ids `[1, T]`; keeps logits, block outputs and routing. Gradients flow where they are enabled."""
    trace = Trace(values=[{} for _ in model.layers])
    with _hooks() as handles:
        for i, block in enumerate(blocks_of(model)):
            handles.append(block.register_forward_hook(_keep(trace.values[i], stages.BLOCK.name)))
            if block.moe_enabled:
                handles.append(block.moe.router.register_forward_hook(_keep_our_routing(trace, i, block.moe)))
        trace.logits = model(ids, positions)[0]
    return trace


def _keep_our_routing(trace: Trace, layer: int, moe: Any) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        scores = output[2].detach().flatten(0, 1).float()
        bias = moe.expert_bias_E
        choice = scores if bias is None else scores + bias
        trace.routing[layer] = Routing(scores, choice.topk(module.top_k).indices)  # type: ignore[arg-type]
        trace.values[layer]["router scores"] = scores

    return hook


@torch.no_grad()
def run_block(block: KimiLinearBlock, x: Tensor, experts: Tensor | None) -> tuple[Values, dict[str, Any]]:
    """Run one of our blocks on x `[1, T, D]`, experts `[T, k]` forced; every stage, and the operator's arguments."""
    values: Values = {}
    calls: list[dict[str, Any]] = []
    with _hooks() as handles, _recorded_operator(calls):
        for stage in stages_of(block):
            if stage.ours:
                handles.append(block.get_submodule(stage.ours).register_forward_hook(_keep(values, stage.name)))
        if block.mixer_name == "attention":
            handles.append(block.attention.wo.register_forward_pre_hook(_keep_input(values, stages.ATTENTION)))
        if block.moe_enabled:
            scores = Trace(values=[values])
            handles.append(block.moe.router.register_forward_hook(_keep_our_routing(scores, 0, block.moe)))
            handles.append(block.moe.router.register_forward_pre_hook(_force(experts)))  # type: ignore[arg-type]
        values[stages.BLOCK.name] = block(x)
    if not calls:
        return values, {}
    call = calls[0]
    values |= {f"{x} after convolution": call[x] for x in "qkv"}
    values["log-decay"] = openkda.kda_gate(
        call["g"], call["A_log"], call["dt_bias"], lower_bound=call.get("lower_bound")
    )
    values[stages.ATTENTION] = call["o"]
    return values, call


@contextlib.contextmanager
def _recorded_operator(calls: list[dict[str, Any]]) -> Iterator[None]:
    """Note the arguments and the output of every chunk_kda that our KDA layers call."""

    def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        o, state = plain.chunk_kda(q, k, v, g, beta, **options)
        calls.append({"q": q, "k": k, "v": v, "g": g, "beta": beta, **options, "o": o})
        return o, state

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return chunk_kda if name == "chunk_kda" else getattr(plain, name)

    plain: Any = titan_kda.openkda
    titan_kda.openkda = Recorded()  # type: ignore[assignment]
    try:
        yield
    finally:
        titan_kda.openkda = plain


@torch.no_grad()
def decode_ours(model: KimiLinearModel, reference: Decoding) -> Decoding:
    """Give every mixer of ours the inputs that the reference's got, in as many calls, with a cache of its own."""
    out = Decoding(reference.inputs, [[] for _ in model.layers], {})
    total = sum(x.shape[1] for x in reference.inputs[0])
    caches = model.init_cache(1, max_length=total)
    assert isinstance(caches, DecodeCache)
    for i, (block, cache) in enumerate(zip(blocks_of(model), caches.layers, strict=True)):
        mixer = getattr(block, block.mixer_name)
        for x in reference.inputs[i]:
            out.outputs[i].append(mixer(x, cache=cache))
            if isinstance(cache, KDACache) and i not in out.states:
                assert isinstance(cache.state, torch.Tensor)
                out.states[i] = cache.state.clone()
    return out
