"""`AutoLoader`: a `PipelineParallel` that is configured by a JSON file."""

from __future__ import annotations

from typing import Any, Generator, Sequence

from .config import LoaderConfig, load_config
from .loader import SafeTensorsFileLoader, StrPath
from .parallel_loader import PipelineParallel

_LOADER = "base"


class AutoLoader:
    """Returns the tensors of files one after the other. `load_config()` configures how they are loaded."""

    def __init__(self, pg: Any, hf_weights_files: Sequence[StrPath], device: Any = "cpu") -> None:
        self._config = load_config()
        if self._config.loader != _LOADER:
            raise ValueError(f"loader={self._config.loader!r}: expected {_LOADER!r}, which reads every mounted file system")
        section = self._config.get_extension_config(_LOADER)
        loader = SafeTensorsFileLoader(pg, device, framework=self._config.framework, **section)
        self._pipeline = PipelineParallel(pg, loader, hf_weights_files, **self._config.create_parallel_kwargs())

    @property
    def config(self) -> LoaderConfig:
        """The configuration."""
        return self._config

    def iterate_weights(self) -> Generator[tuple[str, Any], None, None]:
        """Yields pairs of name and tensor, file by file, and within a file in the order of their bytes. Tensors own
        their memory."""
        return self._pipeline.iterate_weights()

    def close(self) -> None:
        """Closes the loader. Tensors that were returned stay valid."""
        self._pipeline.close()
