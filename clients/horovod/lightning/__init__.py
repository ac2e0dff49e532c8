"""`horovod.lightning`: LightningModules trained by Horovod.

    import lightning as L
    from horovod.lightning import HorovodStrategy

    trainer = L.Trainer(strategy=HorovodStrategy(), max_epochs=3)
    trainer.fit(model, loader)

in a script that `horovodrun -np 4` starts, or in a function of horovod.ray.RayExecutor (docs/lightning.md). It does the
same with `import pytorch_lightning`.

    HorovodStrategy (strategy.py)  what a Trainer asks: ranks, devices, reductions, broadcasts, layers and metrics
      reduction.py                 the gradients of one optimizer
      packages.py                  the two names under which Lightning is there
"""

from __future__ import annotations

import importlib.util

from horovod.base.errors import LaunchCode, coded

if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
    raise ImportError(
        coded(
            LaunchCode.MISSING_PROGRAM,
            "horovod.lightning needs Lightning, which is not installed, neither as lightning nor as pytorch_lightning. "
            "Install it with: pip install 'horovod[lightning]'",
        )
    )

from horovod.lightning.strategy import HorovodStrategy

__all__ = ["HorovodStrategy"]
