"""Sample calls from an op's schema alone: guess arguments, and keep the calls that the op accepts.

Each guess runs on data. An op may broadcast by chance. So a guess with tensors of several shapes is kept only if the
op's fake agrees with the op about the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.signature import Arg, Kind, Op, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import flat_metas, output_metas, says_that_data_decide
from shardwise.private_torch.fake import has_no_fake
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
# The sizes of one call all differ, so that they do not fit by chance. The last calls have small and empty sizes.
_SIZES: tuple[Mapping[str, int], ...] = tuple(
    dict(zip(SIZE_NAMES, sizes, strict=True))
    for sizes in ((5, 7, 3, 2, 4), (8, 6, 4, 2, 12), (1, 2, 3, 4, 5), (0, 3, 2, 5, 4))
)
_FIRST = ("ab", "abc", "a", "abcd")
# With at most this number of tensors, each has its own pattern. With more, all tensors after the first share one.
_FREE = 3
_MOST_COMBINATIONS = 200
_MOST_FORMS = 6
_LIST = 2
_OTHER_DTYPES = (*DTYPES[1:], torch.complex64)


@frozen
class _Form:
    """One guess at the tensors of a call: a shape per tensor argument (``None``: absent), and their dtype.

    ``indices`` are the positions of indices. If ``turned``, matrices are transposed in memory. ``plain`` says that all
    tensors have one shape and dtype float32.
    """

    shapes: tuple[Shape | None, ...]
    dtype: torch.dtype = torch.float32
    indices: frozenset[int] = frozenset()
    turned: bool = False
    plain: bool = False


def samples_from_schema(
    op: OpLike, *, shapes: Sequence[Sequence[Sequence[int]]] | None = None, one_shape: bool = False, most: int = 32
) -> list[Sample]:
    """At most ``most`` calls of an op that the op takes, as ``(args, kwargs)`` with small whole CPU tensors.

    ``op`` is an overload, or the result of ``torch.library.custom_op``. Only its schema is read. The function guesses
    tensors (also optional ones and lists), integers and lists of them, floats, flags, strings, dtypes, devices and
    layouts. ``shapes`` has the shapes of each call, one per tensor argument. Give it if no guess can be right, or if
    the op would read beyond a tensor of a wrong shape. With ``one_shape`` all tensors have one shape if the op accepts
    that. The list is empty if the op refuses every guess.
    """
    filler = _Filler(one_op(op, "make samples"))
    if shapes is None:
        # First all tensors of one shape, in many sizes. Then patterns of named sizes, unless ``one_shape`` is enough.
        count = len(filler.tensors)
        plain = [form for shape in SHAPES if filler.find(form := _Form((shape,) * count, plain=True), {}) is not None]
        dtypes = [evolve(plain[0], dtype=dtype, plain=False) for dtype in _OTHER_DTYPES] if plain else []
        turned = [evolve(form, turned=True) for form in plain[:1]]
        patterns = [] if plain and one_shape else _accepted_patterns(filler, known=bool(plain))
        patterned = [_sized(names, indices, sizes) for names, indices in patterns for sizes in _SIZES]
        forms = [*plain, *turned, *dtypes, *patterned]
    else:
        forms = [_Form(tuple(tuple(s) for s in of_call), plain=True) for of_call in shapes]
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
    """For each form the first call that the op takes. For the first form also variants of the other arguments."""
    last_values: dict[str, Any] = {}
    started = False
    for form in forms:
        values = filler.find(form, last_values)
        if values is None:
            continue
        last_values = values
        yield filler.call(form, values)
        # A tensor without dims tells little about other arguments.
        if not started and max((len(s) for s in form.shapes if s is not None), default=0) > 0:
            started = True
            yield from filler.variants(form, values)


# -- forms -------------------------------------------------------------------------------------------------------


def _accepted_patterns(filler: _Filler, *, known: bool) -> list[Pattern]:
    """Patterns of several shapes that the op accepts. ``known`` says that it accepts tensors of one shape.

    If the op accepts no pattern at all, each tensor is tried as an index.
    """
    count = len(filler.tensors)
    if count <= 1:
        return []
    patterns: list[tuple[str, ...]] = []
    for first in _FIRST:
        last = first[-1]
        others = list(dict.fromkeys(("", last, first[0], first, f"{last}e", f"e{last}", first[::-1], f"{first[:-1]}e")))
        rest = product(others, repeat=count - 1) if count <= _FREE else ((o,) * (count - 1) for o in others)
        patterns += [(first, *other) for other in rest]
    accepted = _accepted(filler, patterns, frozenset())
    if not accepted and not known:
        choices = [frozenset({i}) for i in range(count)]
        accepted = next(filter(None, (_accepted(filler, patterns, indices) for indices in choices)), [])
    return [(names, indices) for names, indices in accepted if not known or len(set(names)) > 1][:_MOST_FORMS]


def _accepted(filler: _Filler, patterns: Sequence[tuple[str, ...]], indices: frozenset[int]) -> list[Pattern]:
    return [(p, indices) for p in patterns if filler.find(_sized(p, indices, _SIZES[0]), {}) is not None]


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
        """Values of the other required arguments with which the op takes a form. ``chosen`` is tried first."""
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
        """Values to try for an argument that is not a tensor. The list is empty for a type that cannot be guessed."""
        text, optional = self.types[arg.name]
        guess = _GUESSES.get(text)
        shape = next((s for s in form.shapes if s is not None), ())
        values = [] if guess is None else list(guess(shape))
        return [None, *values] if optional and not arg.has_default else values

    def call(self, form: _Form, values: Mapping[str, Any]) -> Sample:
        """The call of a form with these other arguments. An argument without a value keeps its default."""
        by_name: dict[str, Any] = {}
        for seed, (arg, shape) in enumerate(zip(self.tensors, form.shapes, strict=True)):
            index = seed in form.indices
            if shape is None:
                by_name[arg.name] = None
            elif arg.kind is Kind.TENSORS:
                by_name[arg.name] = [self._tensor(seed + 10 * i, shape, form, index=index) for i in range(_LIST)]
            else:
                by_name[arg.name] = self._tensor(seed, shape, form, index=index)
        by_name |= values
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for arg in signature(self.op).args:
            if arg.is_out or (arg.name not in by_name and not arg.has_default):
                continue
            value = by_name.get(arg.name, arg.default)
            if not arg.kwarg_only:
                args.append(value)
            elif arg.name in by_name:
                kwargs[arg.name] = value
        return args, kwargs

    @staticmethod
    def _tensor(seed: int, shape: Shape, form: _Form, *, index: bool) -> Tensor:
        if index:
            return made(shape, torch.bool, seed).long()  # 0 and 1 are indices of any dim of two elements
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
    """Whether an op takes a call. With ``fake`` its fake must also give the shapes and dtypes of its results."""
    copies = [_copied(v) for v in args], {name: _copied(v) for name, v in kwargs.items()}
    try:
        with torch.no_grad():
            metas = flat_metas(op(*copies[0], **copies[1]))
        if not fake:
            return True
        values = signature(op).bind(args, kwargs)
        planned = output_metas(op, [_spec(v) for v in values])
    except Exception:  # noqa: BLE001  an op may raise anything for a guess that it refuses
        return False
    return planned is None or list(map(_form, planned)) == list(map(_form, metas))


_DATA_DECIDE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def lacks_fake(op: Op, samples: Sequence[Sample]) -> bool:
    """Whether an op lacks a fake. An op whose results depend on data, by its tags or by its fake, needs no other."""
    if not _DATA_DECIDE.isdisjoint(op.tags):
        return False
    for args, kwargs in samples:
        try:
            values = [_spec(v) for v in signature(op).bind(args, kwargs)]
            return output_metas(op, values) is None and not says_that_data_decide(op, values)
        except Exception as error:  # noqa: BLE001  a fake that raises is for the oracle to judge
            if has_no_fake(error):
                return True
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
