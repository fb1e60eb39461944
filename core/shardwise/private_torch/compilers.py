"""The compiler's modules, to be imported ahead: the first op of a process would import them, which takes a second."""

import torch._dynamo.backends.debugging
import torch._inductor.compile_fx  # noqa: F401
