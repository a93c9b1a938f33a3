"""Run both models on every prompt and gather what they do differently.

Each layer is judged twice. `hidden_error` is that of the whole model up to there: what a user gets. `stages` are the
errors of that layer alone, given the reference's input and the reference's experts: a fault shows in its own layer
only, and the first stage over the tolerance is where to look.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.integrations.torchtitan.state_dict_adapter import KimiLinearStateDictAdapter, disk_names, layout
from openkda.parity import causes, record, stages
from openkda.parity.metrics import ErrorSum, Figures, TokenFigures, last_tokens, summarize, token_figures
from openkda.parity.pair import Pair
from openkda.parity.prompts import Prompt
from openkda.parity.reference import quiet, require_own_operators
from openkda.parity.results import Comparison, Finding, Gradient, LayerReport, Packed, Tie, WorstToken

# Largest relative RMS error of a stage, given equal inputs, that rounding explains. fp32: a thousand times what two
# good implementations show. bf16: eight roundings of 2^-8; small faults hide below, so look for causes in fp32.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
DECODE_STEPS = 4
NUM_WORST, NUM_TIES = 10, 12


def compare(
    pair: Pair, *, routing: str = "natural", grad: bool = False, packed: bool = False, tolerance: float | None = None
) -> Comparison:
    """Compare the two models of a pair on its prompts.

    Args:
        routing: "natural": each model chooses its experts. "forced": ours takes the reference's, token by token.
        grad: Compare the gradients of every parameter, too, of the mean next-token loss.
        packed: Run ours on all prompts in one packed row, too, and compare with one by one.
        tolerance: Relative RMS error of a stage that counts as rounding; None takes TOLERANCE of the dtype.
    Raises: ValueError for an unknown routing, or while openkda.integrations.transformers is enabled.
    """
    if routing not in ("natural", "forced"):
        raise ValueError(f"compare: routing must be 'natural' or 'forced', got {routing!r}")
    require_own_operators()
    with quiet():
        return _Run(pair, routing, grad, TOLERANCE[pair.dtype] if tolerance is None else tolerance).go(packed)


class _Run:
    """The state of one comparison while prompts go by."""

    def __init__(self, pair: Pair, routing: str, grad: bool, tolerance: float) -> None:
        self.pair, self.reference, self.ours = pair, pair.reference, pair.ours
        self.routing, self.grad, self.tolerance = routing, grad, tolerance
        self.blocks = record.blocks_of(pair.ours)
        self.hidden = [ErrorSum() for _ in self.blocks]
        self.local = [{s.name: ErrorSum() for s in record.stages_of(b)} for b in self.blocks]
        self.ends = {name: ErrorSum() for name in ("embeddings", "final norm", "lm_head")}
        self.sites: dict[tuple[int, str], causes.Site] = {}
        self.tokens: list[TokenFigures] = []
        self.logits: list[Tensor] = []
        self.reference_logits: list[Tensor] = []
        self.experts: list[dict[int, Tensor]] = []
        self.agreed = [[0, 0] for _ in self.blocks]
        self.score_diff = [0.0] * len(self.blocks)
        self.rerouted = [0] * len(self.blocks)
        self.nearest = [float("inf")] * len(self.blocks)
        self.ties: list[Tie] = []
        self.weight = 1 / sum(p.length - 1 for p in pair.prompts)

    def go(self, packed: bool) -> Comparison:
        for parameter in (*self.reference.parameters(), *self.ours.parameters()):
            parameter.grad = None
        for prompt in self.pair.prompts:
            self._prompt(prompt)
        self._decode(self.pair.prompts[0])
        gradients, own = self._gradients() if self.grad else ([], {})
        return Comparison(
            source=self.pair.source,
            dtype=self.pair.dtype,
            routing=self.routing,
            prompts=len(self.pair.prompts),
            tolerance=self.tolerance,
            last=summarize(last_tokens(self.tokens)),
            all=summarize(self.tokens),
            notes=list(self.pair.notes),
            layers=[self._layer(i) for i in range(len(self.blocks))],
            ties=sorted(self.ties, key=lambda tie: -tie.gap)[:NUM_TIES],
            findings=self._findings(),
            worst=self._worst(),
            gradients=gradients,
            packed=self._packed(own) if packed else None,
            rounding=self._rounding(),
        )

    # ---- one prompt
    def _prompt(self, prompt: Prompt) -> None:
        with torch.set_grad_enabled(self.grad):
            reference = record.run_reference(self.reference, self.ours, prompt.ids)
            self._backward(reference.logits, prompt.ids)
            experts = {i: r.experts for i, r in reference.routing.items()}
            with record.forced(self.ours, experts if self.routing == "forced" else None):
                ours = record.run_ours(self.ours, prompt.ids)
            self._backward(ours.logits, prompt.ids)
        assert reference.logits is not None
        assert ours.logits is not None
        self.tokens.append(token_figures(reference.logits, ours.logits))
        self.reference_logits.append(reference.logits.detach())
        self.logits.append(ours.logits.detach())
        self.experts.append(experts)
        for i in range(len(self.blocks)):
            self.hidden[i].add(reference.inputs[i + 1], ours.values[i][stages.BLOCK.name])
            if i in experts:
                self._compare_routing(i, prompt, reference.routing[i], ours.routing[i])
        self._compare_locally(prompt, reference)

    def _backward(self, logits: Tensor | None, ids: Tensor) -> None:
        if self.grad:
            assert logits is not None
            (F.cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="sum") * self.weight).backward()

    @torch.no_grad()
    def _compare_locally(self, prompt: Prompt, reference: record.Trace) -> None:
        for i, block in enumerate(self.blocks):
            routing = reference.routing.get(i)
            values, call = record.run_block(block, reference.inputs[i], None if routing is None else routing.experts)
            for stage in record.stages_of(block):
                if stage.name not in values:  # the state and decoding, compared elsewhere
                    continue
                error = ErrorSum()
                error.add(reference.values[i][stage.name], values[stage.name])
                self.local[i][stage.name].error += error.error
                self.local[i][stage.name].size += error.size
                if not error.relative <= self.tolerance and (i, stage.name) not in self.sites:
                    layer = self.reference.model.layers[i]
                    self.sites[i, stage.name] = causes.Site(
                        stage, block, layer, reference.values[i], values, reference.operator.get(i, {}), call,
                        reference.inputs[i],
                    )  # fmt: skip
        assert reference.embeddings is not None
        assert reference.normed is not None
        assert reference.logits is not None
        self.ends["embeddings"].add(reference.embeddings, self.ours.tok_embeddings(prompt.ids))
        self.ends["final norm"].add(reference.normed, self.ours.norm(reference.inputs[-1]))
        self.ends["lm_head"].add(reference.logits, self.ours.lm_head(reference.normed))

    def _compare_routing(self, i: int, prompt: Prompt, reference: record.Routing, ours: record.Routing) -> None:
        k = reference.experts.shape[-1]
        shared = (reference.experts[:, :, None] == ours.experts[:, None, :]).any(-1).sum(-1)  # [T]
        self.agreed[i][0] += int(shared.sum())
        self.agreed[i][1] += reference.experts.numel()
        self.score_diff[i] = max(self.score_diff[i], (reference.scores - ours.scores).abs().max().item())
        bias = self.reference.model.layers[i].mlp.gate.e_score_correction_bias
        ranked = (reference.scores + bias).sort(-1, descending=True).values
        if ranked.shape[-1] == k:  # every expert is always chosen
            return
        gaps = ranked[:, k - 1] - ranked[:, k]  # [T]
        self.nearest[i] = min(self.nearest[i], gaps.min().item())
        for t in (shared < k).nonzero().flatten().tolist():
            self.rerouted[i] += 1
            chosen = (sorted(r.experts[t].tolist()) for r in (reference, ours))
            self.ties.append(Tie(i, prompt.name, t, prompt.pieces[t], gaps[t].item(), *chosen))

    def _decode(self, prompt: Prompt) -> None:
        if prompt.length <= DECODE_STEPS:
            return
        reference = record.decode_reference(self.reference, prompt.ids, DECODE_STEPS)
        ours = record.decode_ours(self.ours, reference)
        self.decoded = (reference, ours)
        for i in range(len(self.blocks)):
            if i in reference.states:
                self.local[i][stages.STATE].add(reference.states[i], ours.states[i])
            for a, b in zip(reference.outputs[i][1:], ours.outputs[i][1:], strict=True):
                self.local[i][stages.DECODE].add(a, b)

    # ---- results
    def _layer(self, i: int) -> LayerReport:
        block = self.blocks[i]
        errors = {name: error.relative for name, error in self.local[i].items()}
        report = LayerReport(
            index=i,
            mixer="KDA" if block.mixer_name == "kda" else "MLA",
            ffn="experts" if block.moe_enabled else "dense",
            hidden_error=self.hidden[i].relative,
            stages=errors,
            first_stage=next((name for name, error in errors.items() if not error <= self.tolerance), None),
        )
        if block.moe_enabled:
            report.expert_agreement = self.agreed[i][0] / self.agreed[i][1]
            report.score_diff = self.score_diff[i]
            report.tokens_rerouted = self.rerouted[i]
            report.nearest_tie = self.nearest[i]
        return report

    def _findings(self) -> list[Finding]:
        out = list(self._weight_findings())
        for name, error in self.ends.items():
            if not error.relative <= self.tolerance:
                disk = {"embeddings": "model.embed_tokens", "final norm": "model.norm", "lm_head": "lm_head"}[name]
                out.append(Finding(name, error.relative, [f"{disk}.weight"], None))
        for i in range(len(self.blocks)):
            report = self._layer(i)
            if report.first_stage is not None:
                out.append(self._explain(i, report.first_stage, report.stages[report.first_stage]))
        return out

    def _weight_findings(self) -> Iterable[Finding]:
        adapter = KimiLinearStateDictAdapter(self.ours.config, None)
        own = adapter.to_hf(self.ours.state_dict())
        raw = disk_names({k: v.detach() for k, v in self.reference.state_dict().items()})
        reference = {adapter.canonical_name(name): value for name, value in raw.items()}
        for name, error, what in causes.compare_weights(reference, own):
            yield Finding(f"weights, {name}", error, [name], f"not equal to the reference's: {what}")

    def _explain(self, i: int, name: str, error: float) -> Finding:
        stage = next(s for s in record.stages_of(self.blocks[i]) if s.name == name)
        cause = None
        if (i, name) in self.sites:
            cause = causes.explain(self.sites[i, name])
        elif name == stages.STATE:
            reference, ours = self.decoded
            cause = causes.state_transposed(reference.states[i], ours.states[i])
        elif name == stages.DECODE:
            cause = (
                "decoding with a cache differs, while the whole text at once does not: look at how state is carried on"
            )
        parameters = [f"model.layers.{i}.{p}" for p in stage.parameters]
        return Finding(f"layer {i} ({self._layer(i).mixer}), {name}", error, parameters, cause)

    def _worst(self) -> list[WorstToken]:
        names = {int(t): piece for p in self.pair.prompts for t, piece in zip(p.ids[0], p.pieces, strict=True)}
        places = [(f.kl[t].item(), n, t) for n, f in enumerate(self.tokens) for t in range(len(f.kl))]
        out = []
        # NaN first: nothing is worse.
        for kl, n, t in sorted(places, key=lambda place: (place[0] == place[0], -place[0]))[:NUM_WORST]:
            prompt = self.pair.prompts[n]
            tops = [
                [names.get(i, f"#{i}") for i in logits[n][t].float().topk(min(5, logits[n].shape[-1])).indices.tolist()]
                for logits in (self.reference_logits, self.logits)
            ]
            before = "".join(prompt.pieces[max(0, t - 40) : t])
            out.append(WorstToken(prompt.name, t, before, prompt.pieces[t], kl, self.tokens[n].cos[t].item(), *tops))
        return out

    def _gradients(self) -> tuple[list[Gradient], dict[str, Tensor]]:
        adapter = KimiLinearStateDictAdapter(self.ours.config, None)
        raw = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in self.reference.named_parameters()}
        reference = adapter.from_hf(disk_names(raw))
        own = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in self.ours.named_parameters()}
        padding = self.reference.model.embed_tokens.padding_idx
        entries = layout(self.ours.config)
        out = []
        for name, value in own.items():
            want = reference[name]
            if name == "tok_embeddings.weight" and padding is not None:  # transformers gives the padding token none
                keep = torch.arange(len(value)) != padding
                want, value = want[keep], value[keep]
            error = ErrorSum()
            error.add(want, value)
            label = entries[name].disk[0].replace(".experts.0.", ".experts.*.")
            out.append(Gradient(label, error.relative, want.double().norm().item()))
        own = {name: value.clone() for name, value in own.items()}
        return sorted(out, key=lambda g: (g.error == g.error, -g.error)), own

    def _packed(self, separate: dict[str, Tensor]) -> Packed:
        prompts = self.pair.prompts
        ids = torch.cat([p.ids for p in prompts], 1)
        positions = torch.cat([torch.arange(p.length) for p in prompts])[None]
        experts = {i: torch.cat([e[i] for e in self.experts]) for i in self.experts[0]}
        for parameter in self.ours.parameters():
            parameter.grad = None
        with torch.set_grad_enabled(self.grad), record.forced(self.ours, experts if self.routing == "forced" else None):
            logits = self.ours(ids, positions)[0]
            pieces = logits.split([p.length for p in prompts])
            if self.grad:
                losses = [
                    F.cross_entropy(piece[:-1].float(), p.ids[0, 1:], reduction="sum")
                    for piece, p in zip(pieces, prompts, strict=True)
                ]
                (sum(losses) * self.weight).backward()  # type: ignore[union-attr]
        error = ErrorSum()
        error.add(torch.cat(self.logits), logits)
        out = Packed(
            error.relative,
            (torch.cat(self.logits).double() - logits.detach().double()).abs().max().item(),
            summarize([token_figures(a, b.detach()) for a, b in zip(self.reference_logits, pieces, strict=True)]),
        )
        for name, parameter in self.ours.named_parameters():
            if self.grad and parameter.grad is not None:
                gradient = ErrorSum()
                gradient.add(separate[name], parameter.grad)
                if out.gradient_error is None or not gradient.relative <= out.gradient_error:
                    out.gradient_error, out.gradient_name = gradient.relative, name
        return out

    @torch.no_grad()
    def _rounding(self) -> Figures | None:
        if self.pair.exact is None:
            return None
        exact = [self.pair.exact(p.ids, use_cache=False).logits[0] for p in self.pair.prompts]
        return summarize([token_figures(a, b) for a, b in zip(exact, self.reference_logits, strict=True)])
