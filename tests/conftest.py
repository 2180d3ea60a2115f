"""Before torch is used: a virtual machine may announce matrix tiles (AMX) that it cannot run, and bfloat16 would crash."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
