"""Override: attributes that stand in for a module's own for as long as tierkv is attached to it."""

from typing import Any

import torch


class Override:
    """Sets attributes of one module; ``remove`` puts back what was there. A copy or pickle of the module has none of them."""

    def __init__(self, module: torch.nn.Module, **attributes: Any) -> None:
        """Set ``attributes`` on ``module``."""
        self._module = module
        self._inner_state = module.__getstate__
        # Pickle and copy ask the object itself for its state, so that one attribute more serves them all.
        self._attributes = {**attributes, "__getstate__": self._state}
        self._before = {name: module.__dict__[name] for name in self._attributes if name in module.__dict__}
        module.__dict__.update(self._attributes)

    def remove(self) -> None:
        """Put back what was there, except where somebody else set the attribute again since: theirs may call ours."""
        self._undo(self._module.__dict__)

    def _state(self) -> dict[str, Any]:
        state = dict(self._inner_state())
        self._undo(state)
        return state

    def _undo(self, attributes: dict[str, Any]) -> None:
        for name, value in self._attributes.items():
            if attributes.get(name) is not value:
                continue
            del attributes[name]
            if name in self._before:
                attributes[name] = self._before[name]
