"""WeightTransfer: other weights for a running engine, from a directory or in several files.

Owned by ControlCalls, whose table names its methods. What is open is plain data in the control state, so that a front
end can bring a new incarnation there. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trio_llm.engine.engine_state import EngineControlState, SleepState
from trio_llm.engine.executor.base import Executor
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.worker.weight_files import WeightFile, WeightSource
from trio_llm.errors import EngineStartupError, InvalidRequestError
from trio_llm.wire.messages import PlainValue, StateValue

__all__ = ["WeightTransfer"]

_MAX_VERSION_CHARS: Final = 256
_MAX_FILES: Final = 4096

State = dict[str, StateValue]


class WeightTransfer:
    """Carries out the calls for weights. Each returns the control state that it leaves.

    All raise InvalidRequestError for what is the caller's fault; nothing has changed then. They raise DeviceLostError
    if the weights may be half of the one sort and half of the other.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, state: EngineControlState) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._state = state
        self._staged: set[str] = set()
        """Checksums of the files that the executor has read."""

    def update(self, path: PlainValue, version: PlainValue) -> State:
        """Take the weights of a directory at once. An update in several files that is open ends, and was for nothing.

        Args:
            path: a directory in Hugging Face form.
        """
        version = _checked_version(version)
        if not isinstance(path, str) or not path or not _is_folder(path):
            raise InvalidRequestError(f"path {path!r} is not a directory with weights in Hugging Face form", "path")
        self._take(Path(path), version, "path")
        self._state.weights_path, self._state.weights_files = path, {}
        return self._state.describe()

    def init(self, directory: PlainValue) -> State:
        """Say where the files of updates are. An update that is open ends, and was for nothing."""
        if not isinstance(directory, str) or not directory or not _is_folder(directory):
            raise InvalidRequestError(f"directory {directory!r} is not a directory", "init_info.directory")
        self._close()
        self._state.transfer_directory = directory
        return self._state.describe()

    def start(self) -> State:
        """Begin an update in several files. One that is open begins anew."""
        if self._state.transfer_directory is None:
            raise InvalidRequestError("there is no directory for weights; call init_weight_transfer_engine first")
        self._close()
        self._state.update_files = {}
        return self._state.describe()

    def stage(self, *names: PlainValue) -> State:
        """Read files of the update that is open. A name that came before is read again.

        Args:
            names: of safetensors files, from the directory of `init`.
        """
        files = self._open_files()
        field = "update_info.files"
        if not names or len(files) + len(names) > _MAX_FILES:
            raise InvalidRequestError(f"an update has 1 to {_MAX_FILES} files", field)
        paths = {str(name): self._path_of(name) for name in names}
        try:
            found = {name: self._executor.stage_weights(path) for name, path in paths.items()}
            files |= found
            self._staged |= set(found.values())
        except EngineStartupError as error:
            raise InvalidRequestError(str(error), field) from error
        finally:
            self._keep_staged(files)
        return self._state.describe()

    def prepare(self) -> State:
        """Have all files of the update that is open in memory, so that `finish` fails on no engine alone. A new
        incarnation reads those again that the one before had read. Does nothing if no update is open."""
        field = "update_info.files"
        for name, checksum in (self._state.update_files or {}).items():
            if checksum in self._staged:
                continue
            try:
                found = self._executor.stage_weights(self._path_of(name))
            except EngineStartupError as error:
                raise InvalidRequestError(str(error), field) from error
            if found != checksum:
                self._keep_staged(self._open_files())
                raise InvalidRequestError(f"{name[:100]!r} has changed since it was read; send it again", field)
            self._staged.add(checksum)
        return self._state.describe()

    def finish(self, version: PlainValue) -> State:
        """Take the weights of all files of the update, and end it. If they are refused, it stays open.

        The call may come again after it was carried out: then it changes nothing.
        """
        version, state = _checked_version(version, "weight_version"), self._state
        if state.update_files is None and state.weights_files and state.weight_version == version:
            return state.describe()
        files = self._open_files()
        if not files:
            raise InvalidRequestError("the weight update has no files; call update_weights first")
        assert state.transfer_directory is not None
        self._take(_sources(state.transfer_directory, files), version, "update_info.files")
        state.weights_path, state.weights_files = state.transfer_directory, files
        return state.describe()

    def restore_weights(self, directory: PlainValue, version: PlainValue, *lines: PlainValue) -> State:
        """Bring a new incarnation to the weights that the one before had taken in several files.

        Args:
            lines: as in `EngineControlState.describe`.
        """
        files = _parse_lines(lines)
        self._take(_sources(str(directory), files), str(version), None)
        self._state.weights_path, self._state.weights_files = str(directory), files
        return self._state.describe()

    def restore_update(self, directory: PlainValue, is_open: PlainValue, *lines: PlainValue) -> State:
        """Bring an engine to where it, or the incarnation before, was with an update. Files that it has not read are
        read when the update is finished.

        Args:
            directory: None: none was said yet.
            lines: as in `EngineControlState.describe`.
        """
        files = _parse_lines(lines)
        self._keep_staged(files)
        self._state.transfer_directory = None if directory is None else str(directory)
        self._state.update_files = files if is_open else None
        return self._state.describe()

    def _open_files(self) -> dict[str, str]:
        if self._state.update_files is None:
            raise InvalidRequestError("no weight update is open; call start_weight_update first")
        return self._state.update_files

    def _path_of(self, name: PlainValue) -> Path:
        """Where a file is, which must be in the directory whatever links it goes through."""
        assert self._state.transfer_directory is not None
        field = "update_info.files"
        if not isinstance(name, str) or not name:
            raise InvalidRequestError("names of files must be strings, and not empty", field)
        directory = Path(self._state.transfer_directory)
        try:
            path = (directory / name).resolve()
            is_inside = path.is_relative_to(directory.resolve())
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
            raise InvalidRequestError(f"{name[:100]!r} is not a path", field) from error
        if not is_inside:
            raise InvalidRequestError(f"{name[:100]!r} leads out of the directory of the weights", field)
        return path

    def _take(self, source: WeightSource, version: str, field: str | None) -> None:
        """Compute all that follows with these weights, and end the update that is open."""
        if self._state.sleep_state not in (SleepState.AWAKE, SleepState.ONLY_WEIGHTS):
            raise InvalidRequestError("the weights are asleep; call wake_up with the tag weights first")
        try:
            self._executor.update_weights(source)
        except EngineStartupError as error:
            raise InvalidRequestError(str(error), field) from error
        self._scheduler.preempt_all()
        self._state.weight_version = version
        self._close()

    def _keep_staged(self, files: dict[str, str]) -> None:
        """Forget what was read of other files than these."""
        self._executor.keep_staged(files.values())
        self._staged &= set(files.values())

    def _close(self) -> None:
        self._keep_staged({})
        self._state.update_files = None


def _checked_version(version: PlainValue, field: str = "version") -> str:
    if not isinstance(version, str) or not 1 <= len(version) <= _MAX_VERSION_CHARS:
        raise InvalidRequestError(f"{field} must be a string of 1 to {_MAX_VERSION_CHARS} characters", field)
    return version


def _sources(directory: str, files: dict[str, str]) -> tuple[WeightFile, ...]:
    return tuple(WeightFile(Path(directory, name), checksum) for name, checksum in files.items())


def _parse_lines(lines: tuple[PlainValue, ...]) -> dict[str, str]:
    pairs = [str(line).split("  ", 1) for line in lines]
    return {name: checksum for checksum, name in pairs}


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # the name is too long or has a NUL, or a folder on the way may not be read
        return False
