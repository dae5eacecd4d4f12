"""TensorRT engines of the tiny pair, really built for a GPU that is not here, each once a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.conversion.convert import CalibrationData, plan_conversion
from dflash_trt.conversion.plan import Formats
from dflash_trt.engine.build import Build, plan_build
from dflash_trt.engine.config import BuildConfig
from dflash_trt.engine.directory import Engine

TEXT = [
    "Write the diary of Bruno the teacher, who seeks the golden boat.",
    "Write the diary of Clara the sailor, who seeks the old map.",
]
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_batch_size": 4, "max_seq_len": 128, "max_num_tokens": 64}


class TensorRTEngines:
    """Checkpoints by format, and engines by format and number of ranks."""

    def __init__(self, root: Path, tiny: Path) -> None:
        self._root = root
        self._tiny = tiny
        self._engines: dict[tuple[str, int], Engine] = {}

    def checkpoints(self, qformat: str) -> Path:
        """The directory with the tiny pair, both models in one format: bf16, fp8, nvfp4 or w4a16_nvfp4."""
        if qformat == "bf16":
            return self._tiny
        directory = self._root / qformat
        if not directory.exists():
            text = self._root / "text.txt"
            text.write_text("\n".join(TEXT))
            formats = Formats(qformat)  # type: ignore[arg-type]
            data = None if qformat == "w4a16_nvfp4" else CalibrationData(text, size=2, max_length=64)
            target, drafter = open_target(self._tiny / "target"), open_drafter(self._tiny / "drafter")
            plan_conversion(target, formats, drafter, formats, data, directory).run()
        return directory

    def plan(self, qformat: str, output: Path, compute_capability: str = "sm120", **options: Any) -> Build:
        """A build that is only checked."""
        checkpoints = self.checkpoints(qformat)
        target, drafter = open_target(checkpoints / "target"), open_drafter(checkpoints / "drafter")
        config = BuildConfig(**{**OPTIONS, **options})
        return plan_build(target, drafter, config, output, "tensorrt_rtx", compute_capability)

    def engine(self, qformat: str, ranks: int = 1) -> Engine:
        """An engine for SM120; it must not be changed."""
        key = qformat, ranks
        if key not in self._engines:
            output = self._root / f"{qformat}-{ranks}"
            self._engines[key] = self.plan(qformat, output, tp_size=ranks).write(workers=ranks)
        return self._engines[key]
