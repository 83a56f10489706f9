"""How XLA compiles SAM."""

from functools import partial

import jax

OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 4}
"""Products of matrices by cuBLASLt alone: those of Triton are tried for minutes, of matrices as
large as SAM's none wins, and only cuBLASLt's add biases, residuals and GELU on their way out.
Large products are not merged with others of the same inputs, for then biases are added afterwards.
"""

jit = partial(jax.jit, compiler_options=OPTIONS)
"""`jax.jit` with these."""
