"""Sample calls from an op's schema alone: arguments are guessed, and the calls that the op accepts are kept.

Each guess runs on data. A guess with tensors of several shapes is kept only where the op's fake agrees with what the op
returns: an op may broadcast by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from shardwise.kernel.signature import Arg, Kind, Op, signature
from shardwise.kernel.spec import AbstractMesh, TensorMeta, TensorSpec
from shardwise.planning.results import flat_metas, output_metas
from shardwise.private_torch.ops import OpLike, schema_of
from shardwise.testing.values import DTYPES, SHAPES, Sample, made, one_op

__all__ = [
    "SIZE_NAMES",
    "Pattern",
    "accepts",
    "calls_of",
    "lacks_fake",
    "patterns_of",
    "redrawn",
    "samples_from_schema",
]

Shape = tuple[int, ...]

SIZE_NAMES = "abcde"
# All differ, so that sizes do not fit by chance. The last ones are small and empty.
_SIZES: tuple[Mapping[str, int], ...] = tuple(
    dict(zip(SIZE_NAMES, sizes, strict=True))
    for sizes in ((5, 7, 3, 2, 4), (8, 6, 4, 2, 12), (1, 2, 3, 4, 5), (0, 3, 2, 5, 4))
)
_FIRST = ("ab", "abc", "a", "abcd")
# Up to so many tensors each may have its own pattern; beyond, all tensors after the first have the same.
_FREE = 3
_MOST_COMBINATIONS = 200
_MOST_FORMS = 6
_LIST = 2


@frozen
class _Form:
    """One guess at the tensors of a call: a shape per tensor argument (``None``: absent), which are indices, and their
    memory format. ``plain`` says that all have one shape and dtype float32.
    """

    shapes: tuple[Shape | None, ...]
    dtype: torch.dtype = torch.float32
    indices: frozenset[int] = frozenset()
    turned: bool = False
    plain: bool = False


def samples_from_schema(
    op: OpLike, *, shapes: Sequence[Sequence[Sequence[int]]] | None = None, alike: bool = False, most: int = 32
) -> list[Sample]:
    """At most ``most`` calls of an op that the op takes, as ``(args, kwargs)`` with small whole CPU tensors.

    ``op`` is an overload or what ``torch.library.custom_op`` returned; it needs only its schema. Tensors (also
    optional ones and lists), integers and lists of them, floats, flags, strings, dtypes, devices and layouts are
    guessed. ``shapes`` gives the shapes per call, one per tensor argument, where a guess cannot be right or where the
    op would read beyond a tensor of a wrong shape. With ``alike`` all tensors have one shape if the op accepts that.
    The list is empty when the op refuses every guess.
    """
    filler = _Filler(one_op(op, "make samples"))
    if shapes is None:
        forms = _guessed_forms(filler, alike=alike)
    else:
        forms = [_Form(tuple(tuple(s) for s in given), plain=True) for given in shapes]
    return list(islice(_calls(filler, forms), most))


# -- for strategies ----------------------------------------------------------------------------------------------


Pattern = tuple[tuple[str, ...], frozenset[int]]
"""Named sizes per tensor argument (``("ab", "b")``), and which of the tensors are indices."""


def patterns_of(op: Op) -> list[Pattern]:
    """Patterns that the op accepts: first those with one shape for all tensors."""
    filler = _Filler(op)
    count = len(filler.tensors)
    same: list[Pattern] = [((names,) * count, frozenset()) for names in ("a", "ab", "abc", "")]
    plain = [p for p in same if filler.find(_sized(*p, _SIZES[0], plain=True), {}) is not None]
    return list(dict.fromkeys([*plain, *_accepted_patterns(filler, known=bool(plain))]))


def calls_of(op: Op, pattern: Pattern, sizes: Mapping[str, int]) -> list[Sample]:
    """The calls of one pattern with these sizes: one, then those that differ from it in one other argument."""
    names, indices = pattern
    return list(_calls(_Filler(op), [_sized(names, indices, sizes, plain=len(set(names)) == 1)]))


def redrawn(sample: Sample, seed: int) -> Sample:
    """The same call with other values in its floating tensors; 0 leaves them."""
    args, kwargs = sample
    return [_redrawn(v, seed + i) for i, v in enumerate(args)], {k: _redrawn(v, seed) for k, v in kwargs.items()}


def _redrawn(value: Any, seed: int) -> Any:
    if isinstance(value, list):
        return [_redrawn(v, seed + 100 * i) for i, v in enumerate(value)]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.empty_like(value).copy_(made(value.shape, value.dtype, seed))


# -- one form after the other ------------------------------------------------------------------------------------


def _calls(filler: _Filler, forms: Sequence[_Form]) -> Iterator[Sample]:
    """For each form the first call that the op takes; for the first form variants of everything else, too."""
    chosen: dict[str, Any] = {}
    started = False
    for form in forms:
        values = filler.find(form, chosen)
        if values is None:
            continue
        chosen = values
        yield filler.call(form, values)
        # A tensor without elements, or with one, tells little about other arguments.
        if not started and max((len(s) for s in form.shapes if s is not None), default=0) > 0:
            started = True
            yield from filler.variants(form, values)


# -- forms -------------------------------------------------------------------------------------------------------


def _guessed_forms(filler: _Filler, *, alike: bool) -> list[_Form]:
    """Forms that the op accepts: first all tensors of one shape, in many sizes; then patterns of named sizes, unless
    ``alike`` is set and the first ones exist.
    """
    count = len(filler.tensors)
    plain = [form for shape in SHAPES if filler.find(form := _Form((shape,) * count, plain=True), {}) is not None]
    dtypes = [evolve(plain[0], dtype=dtype, plain=False) for dtype in DTYPES[1:]] if plain else []
    turned = [evolve(form, turned=True) for form in plain[:1]]
    beyond = [] if plain and alike else _patterned(filler, known=bool(plain))
    return [*plain, *turned, *dtypes, *beyond]


def _patterned(filler: _Filler, *, known: bool) -> list[_Form]:
    patterns = _accepted_patterns(filler, known=known)
    return [_sized(pattern, indices, sizes) for pattern, indices in patterns for sizes in _SIZES]


def _accepted_patterns(filler: _Filler, *, known: bool) -> list[Pattern]:
    """Patterns with several shapes. Where the op accepts nothing else, some tensors are tried as indices too."""
    count = len(filler.tensors)
    if count <= 1:
        return []
    patterns = list(_patterns(count))
    accepted = _accepted(filler, patterns, frozenset())
    if not accepted and not known:
        choices = [frozenset({i}) for i in range(count)]
        accepted = next(filter(None, (_accepted(filler, patterns, indices) for indices in choices)), [])
    return [(names, indices) for names, indices in accepted if not known or len(set(names)) > 1][:_MOST_FORMS]


def _accepted(filler: _Filler, patterns: Sequence[tuple[str, ...]], indices: frozenset[int]) -> list[Pattern]:
    return [(p, indices) for p in patterns if filler.find(_sized(p, indices, _SIZES[0]), {}) is not None]


def _patterns(count: int) -> Iterator[tuple[str, ...]]:
    for first in _FIRST:
        others = list(
            dict.fromkeys(
                ("", first[-1], first[0], first, first[-1] + "e", "e" + first[-1], first[::-1], first[:-1] + "e")
            )
        )
        rest = product(others, repeat=count - 1) if count <= _FREE else ((o,) * (count - 1) for o in others)
        for other in rest:
            yield (first, *other)


def _sized(names: Sequence[str], indices: frozenset[int], sizes: Mapping[str, int], *, plain: bool = False) -> _Form:
    return _Form(tuple(tuple(sizes[name] for name in one) for one in names), indices=indices, plain=plain)


# -- calls -------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Filler:
    """Fills the arguments of one op."""

    op: Op
    tensors: tuple[Arg, ...] = field(init=False)
    #: Type texts of the other arguments, optional ones without their wrapping; and which are optional.
    types: Mapping[str, tuple[str, bool]] = field(init=False)

    @tensors.default
    def _tensors(self) -> tuple[Arg, ...]:
        return tuple(a for a in signature(self.op).tensor_args if not a.is_out)

    @types.default
    def _types(self) -> Mapping[str, tuple[str, bool]]:
        # The schema's text has more than its types: ScalarType is an int there.
        return {a.name: _type(a) for a in schema_of(self.op).arguments}

    @property
    def others(self) -> list[Arg]:
        return [a for a in signature(self.op).args if a.kind not in (Kind.TENSOR, Kind.TENSORS)]

    def find(self, form: _Form, chosen: Mapping[str, Any]) -> dict[str, Any] | None:
        """Values for the required other arguments with which the op takes a form; ``chosen`` ones are tried first."""
        required = [a for a in self.others if not a.has_default]
        options = [self.candidates(a, form) for a in required]
        if any(not o for o in options):
            return None
        names = [a.name for a in required]
        tried = (dict(zip(names, values, strict=True)) for values in product(*options))
        first = [dict(chosen)] if chosen else []
        for values in islice(chain(first, tried), _MOST_COMBINATIONS):
            if accepts(self.op, *self.call(form, values), fake=not form.plain):
                return values
        return None

    def candidates(self, arg: Arg, form: _Form) -> list[Any]:
        """Values to try for an argument that holds no tensor; none when its type is beyond guessing."""
        text, optional = self.types[arg.name]
        guess = _GUESSES.get(text)
        shape = next((s for s in form.shapes if s is not None), ())
        values = [] if guess is None else list(guess(shape))
        return [None, *values] if optional and not arg.has_default else values

    def call(self, form: _Form, values: Mapping[str, Any]) -> Sample:
        """The call of a form with these other arguments; an argument that is not named keeps its default."""
        tensors = {
            a.name: self._tensor(a, i, shape, form)
            for i, (a, shape) in enumerate(zip(self.tensors, form.shapes, strict=True))
        }
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for arg in signature(self.op).args:
            if arg.is_out:
                continue
            given = {**tensors, **values}
            if arg.name not in given and not arg.has_default:
                continue
            value = given.get(arg.name, arg.default)
            if not arg.kwarg_only:
                args.append(value)
            elif arg.name in given:
                kwargs[arg.name] = value
        return args, kwargs

    def _tensor(self, arg: Arg, seed: int, shape: Shape | None, form: _Form) -> Any:
        if shape is None:
            return None
        if arg.kind is Kind.TENSORS:
            return [self._one(seed + 10 * i, shape, form, index=seed in form.indices) for i in range(_LIST)]
        return self._one(seed, shape, form, index=seed in form.indices)

    @staticmethod
    def _one(seed: int, shape: Shape, form: _Form, *, index: bool) -> Tensor:
        if index:
            return made(shape, torch.bool, seed).long()  # 0 or 1 is a place in anything that has two
        value = made(shape, form.dtype, seed)
        return value.t().contiguous().t() if form.turned and value.ndim == 2 else value  # noqa: PLR2004

    def variants(self, form: _Form, values: Mapping[str, Any]) -> Iterator[Sample]:
        """Calls that differ from one that the op takes in one argument: another value, or a tensor left out."""
        for i, arg in enumerate(self.tensors):
            if self.types[arg.name][1]:
                yield from self._if_taken(evolve(form, shapes=(*form.shapes[:i], None, *form.shapes[i + 1 :])), values)
        for arg in self.others:
            now = values.get(arg.name, arg.default)
            for value in self.candidates(arg, form):
                if type(value) is not type(now) or value != now:
                    yield from self._if_taken(form, {**values, arg.name: value})

    def _if_taken(self, form: _Form, values: Mapping[str, Any]) -> Iterator[Sample]:
        sample = self.call(form, values)
        if accepts(self.op, *sample, fake=False):
            yield sample


def accepts(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], *, fake: bool) -> bool:
    """Whether an op takes a call; with ``fake`` also whether its fake says of the results what the op returns."""
    copies = [_copied(v) for v in args], {name: _copied(v) for name, v in kwargs.items()}
    try:
        with torch.no_grad():
            metas = flat_metas(op(*copies[0], **copies[1]))
        if not fake:
            return True
        values = signature(op).bind(args, kwargs)
        known = output_metas(op, [_spec(v) for v in values])
    except Exception:  # noqa: BLE001  an op may refuse a guess with anything
        return False
    return known is None or list(map(_form, known)) == list(map(_form, metas))


_DATA_DECIDE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def lacks_fake(op: Op, samples: Sequence[Sample]) -> bool:
    """Whether an op lacks a fake and has no tag that says that its results depend on data."""
    if not _DATA_DECIDE.isdisjoint(op.tags):
        return False
    for args, kwargs in samples:
        try:
            return output_metas(op, [_spec(v) for v in signature(op).bind(args, kwargs)]) is None
        except Exception:  # noqa: BLE001, S112  a fake that raises is for the oracle to judge
            continue
    return False


def _form(meta: TensorMeta | None) -> Any:
    return None if meta is None else (tuple(meta.shape), meta.dtype)


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copied(v) for v in value]
    return value.clone() if isinstance(value, Tensor) else value


def _spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSpec(AbstractMesh(()), (), TensorMeta.of(value))
    return [_spec(v) for v in value] if isinstance(value, (list, tuple)) else value


# -- other arguments ---------------------------------------------------------------------------------------------


def _type(argument: Any) -> tuple[str, bool]:
    text = str(argument.real_type)
    optional = text.startswith("Optional[")
    return (text.removeprefix("Optional[").removesuffix("]") if optional else text), optional


def _ints(shape: Shape) -> list[int]:
    return list(dict.fromkeys((1, 0, 2, -1, *shape)))


def _int_lists(shape: Shape) -> list[list[int]]:
    numel = 1
    for n in shape:
        numel *= n
    lists = ([0], list(range(len(shape))), list(shape), [numel], [1] * len(shape), [1, 1], [2, 2], [1])
    return [list(v) for v in dict.fromkeys(map(tuple, lists))]


# Argument type -> values to try, given the shape of the first tensor.
_GUESSES: Mapping[str, Callable[[Shape], Sequence[Any]]] = {
    "number": lambda _: (2, -1.5),
    "float": lambda _: (0.5, 2.0),
    "int": _ints,
    "SymInt": _ints,
    "bool": lambda _: (False, True),
    "str": lambda _: ("", "none", "mean", "sum"),
    "ScalarType": lambda _: (torch.float32, torch.float64),
    "Device": lambda _: (torch.device("cpu"),),
    "Layout": lambda _: (torch.strided,),
    "MemoryFormat": lambda _: (torch.contiguous_format,),
    "List[int]": _int_lists,
    "List[SymInt]": _int_lists,
    "List[float]": lambda _: ([0.5, 2.0], [0.5]),
    "List[number]": lambda _: ([2, 0.5], [0.5]),
    "List[bool]": lambda _: ([False], [True, False]),
    "List[str]": lambda _: ([],),
    "Generator": lambda _: (None,),
}
