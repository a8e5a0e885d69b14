"""The demo's second process: it opens the store that the first one wrote, and answers the same prompt again.

``python -m tierkv.cli.demo_restart`` is that process. It loads the model while the first compares logits, and waits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tierkv.benchmarks.restore_process import Child, serve

if TYPE_CHECKING:
    from tierkv.cli.demo_run import Restarted

WARM_UP_TOKENS: Final = 64


@contextmanager
def second_process(source: str) -> Iterator[Child]:
    """Start the process and let it load the model; ``answer_again`` waits for that."""
    import torch

    with Child("the restart", "tierkv.cli.demo_restart") as child:
        child.send("load", source=source, threads=torch.get_num_threads())
        yield child


def answer_again(child: Child, ids: list[int], folder: str, new_tokens: int) -> "Restarted":
    """Have the second process generate from the store in ``folder``.

    Raises:
        TierKVError: it could not.
    """
    from tierkv.cli.demo_run import Restarted

    child.receive()
    return Restarted(**child.ask("answer", ids=ids, folder=folder, new_tokens=new_tokens))


class Second:
    """What the second process does when it is asked."""

    model: Any = None

    def load(self, source: str, threads: int) -> None:
        """Load the model, computing with as many threads as the first process."""
        import torch

        from tierkv.integrations.hf_load import load_model

        torch.set_num_threads(threads)
        self.model, _ = load_model(source, "float32")

    def answer(self, ids: list[int], folder: str, new_tokens: int) -> dict[str, Any]:
        """Generate with the demo's tiers over the store in ``folder``; return the fields of ``Restarted``."""
        import torch

        from tierkv.cli import demo_run
        from tierkv.integrations.hf_compat import block_layout
        from tierkv.integrations.hf_generate import attach

        layout, _ = block_layout(self.model, demo_run.BLOCK_SIZE)
        config = demo_run.demo_config(layout, len(ids), new_tokens, folder)
        prompt = torch.tensor([ids], device=self.model.device)
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        with attach(self.model, config.replace({"prefix.persist": False})):  # load what the first call loads
            demo_run.generate(self.model, {name: part[:, -WARM_UP_TOKENS:] for name, part in inputs.items()}, 2, None)
        with attach(self.model, config) as engine:
            run = demo_run.generate(self.model, inputs, new_tokens, None, cache=engine.new_cache())
        seconds, prefilled = run.stream.prefill_seconds, run.prefilled_tokens
        return {"tokens": run.tokens, "ttft_seconds": seconds, "prefilled_tokens": prefilled}


if __name__ == "__main__":
    second = Second()
    serve({"load": second.load, "answer": second.answer})
