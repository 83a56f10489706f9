"""How XLA compiles SAM."""

from functools import partial

import jax

OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Products of matrices by cuBLASLt alone: those of Triton are tried for minutes, of matrices as
large as SAM's none wins, and only cuBLASLt's add biases, residuals and GELU on their way out."""

jit = partial(jax.jit, compiler_options=OPTIONS)
"""`jax.jit` with these."""
