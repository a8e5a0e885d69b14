"""Random verbs on explicit caches of one engine; after each, generate gives what a fresh stock run gives."""

import copy

import pytest
import torch
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tierkv.errors import TornForward, UnsafeCall

MOST_ROWS, MOST_TOKENS = 4, 150
GREEDY = {"do_sample": False}


class Boom(Exception):
    pass


def caller(lab, model):
    """Return a state machine that calls ``model`` in random ways."""

    class Calls(RuleBasedStateMachine):
        """Two caches: the one in use, and one that rests (a fork of it, or empty)."""

        @initialize(rows=st.integers(1, 2), seed=st.integers(0, 9), pad=st.sampled_from([0, 0, 9]))
        def begin(self, rows, seed, pad):
            self.attached = lab.attach(model, rows=MOST_ROWS, tokens=MOST_TOKENS + 16, spare=1)
            self.engine = self.attached.__enter__()
            self.cache, self.resting = self.engine.new_cache(), self.engine.new_cache()
            self.run(**lab.prompt(rows, 70, seed=seed, pads=(pad,)))

        def run(self, input_ids, attention_mask=None, new=3, **settings):
            ours = model.generate(
                input_ids, attention_mask=attention_mask, cache=self.cache, max_new_tokens=new, **GREEDY, **settings
            )
            stock = lab.stock(model, input_ids, attention_mask=attention_mask, max_new_tokens=new, **GREEDY, **settings)
            assert torch.equal(ours, stock)

        def text(self, more=0, seed=0):
            """Return ids and mask of what the cache holds, and ``more`` random tokens."""
            content = self.cache.content
            new = torch.randint(3, 97, (content.ids.shape[0], more), generator=torch.Generator().manual_seed(seed))
            ids = torch.cat([content.ids, new], dim=1)
            return ids, torch.nn.functional.pad(content.mask.long(), (0, more), value=1)

        @property
        def held(self):
            return self.cache.get_seq_length()

        @property
        def roomy(self):
            return 0 < self.held < MOST_TOKENS - 30

        usable = precondition(lambda self: self.roomy)

        @usable
        @rule(more=st.integers(1, 20), seed=st.integers(0, 99), chunk=st.sampled_from([None, 1, 8]))
        def go_on(self, more, seed, chunk):
            self.run(*self.text(more, seed), prefill_chunk_size=chunk)

        @precondition(lambda self: self.roomy and self.cache.sequences.rows <= 2)
        @rule(
            more=st.integers(1, 5), seed=st.integers(0, 99), kind=st.sampled_from(["num_beams", "num_return_sequences"])
        )
        def go_on_with_several_rows(self, more, seed, kind):
            several = {"num_beams": 2, kind: 2}
            self.run(*self.text(more, seed), **several)

        @precondition(lambda self: self.roomy and self.cache.sequences.rows == 1 and not model._is_stateful)
        @rule(more=st.integers(1, 5), seed=st.integers(0, 99))
        def look_up(self, more, seed):
            self.run(*self.text(more, seed), new=6, prompt_lookup_num_tokens=3)

        @usable
        @rule(more=st.integers(1, 20), seed=st.integers(0, 99))
        def pass_only_the_new(self, more, seed):
            ids, mask = self.text(more, seed)
            stock = lab.stock(model, ids, attention_mask=mask, max_new_tokens=3, **GREEDY)
            ours = model.generate(ids[:, -more:], attention_mask=mask, cache=self.cache, max_new_tokens=3, **GREEDY)
            assert torch.equal(ours[:, more:], stock[:, ids.shape[1] :])

        @usable
        @rule(share=st.floats(0.01, 1), more=st.integers(0, 9), seed=st.integers(0, 99))
        def diverge(self, share, more, seed):
            ids, mask = self.text(more, seed)
            at = min(int(share * ids.shape[1]), ids.shape[1] - 1)
            ids[:, at] = (ids[:, at] + 1 - 3) % 94 + 3
            keep = max(at + 1, mask.argmax(dim=1).max().item() + 1)  # at least one token of every row
            try:
                self.run(ids[:, :keep], mask[:, :keep])
            except UnsafeCall as refused:
                assert "do not continue" in str(refused)
                assert at == 0 or (self.cache.content.mask[:, 0] != mask[:, 0]).any()

        @usable
        @rule(count=st.integers(1, 40))
        def crop(self, count):
            count = min(count, self.held - 20)
            try:
                if count > 0:
                    self.cache.crop(-count)
            except UnsafeCall as refused:
                assert not self.cache.can_crop(-count), refused

        @usable
        @rule(indices=st.lists(st.integers(0, 9), min_size=1, max_size=MOST_ROWS), beam=st.booleans())
        def choose_rows(self, indices, beam):
            rows = self.cache.sequences.rows
            chosen = torch.tensor([index % rows for index in indices])
            (self.cache.reorder_cache if beam else self.cache.batch_select_indices)(chosen)

        @precondition(lambda self: self.roomy and self.cache.sequences.rows <= 2)
        @rule()
        def repeat_rows(self):
            self.cache.batch_repeat_interleave(2)

        @rule()
        def fork(self):
            self.resting.close()
            self.resting = copy.deepcopy(self.cache)

        @rule()
        def change_over(self):
            self.cache, self.resting = self.resting, self.cache

        @usable
        @rule(more=st.integers(1, 5), seed=st.integers(0, 99))
        @torch.no_grad()
        def forward_by_hand(self, more, seed):
            ids, mask = self.text(more, seed)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            model(ids[:, -more:], attention_mask=mask, position_ids=positions[:, -more:], cache=self.cache)

        @usable
        @rule(layer=st.integers(0, 2), after=st.integers(0, 2), seed=st.integers(0, 99))
        def interrupt(self, layer, after, seed):
            left = [after]

            def hook(*_):
                left[0] -= 1
                if left[0] < 0:
                    raise Boom

            handle = model.get_decoder().layers[layer].register_forward_hook(hook)
            try:
                with pytest.raises(Boom):
                    self.run(*self.text(4, seed), new=4)
            finally:
                handle.remove()
            try:
                self.cache.check_usable()
            except TornForward:
                self.cache.reset()

        @rule(tokens=st.integers(10, MOST_TOKENS), seed=st.integers(0, 99))
        def run_something_else(self, tokens, seed):
            batch = lab.prompt(1, tokens, seed=seed)
            ours = model.generate(**batch, max_new_tokens=2, **GREEDY)
            assert torch.equal(ours, lab.stock(model, **batch, max_new_tokens=2, **GREEDY))

        @rule(rows=st.integers(1, 3), tokens=st.integers(1, 60), seed=st.integers(0, 99))
        def start_over(self, rows, tokens, seed):
            self.cache.reset()
            self.run(**lab.prompt(rows, tokens, seed=seed))

        def teardown(self):
            if hasattr(self, "attached"):
                self.cache.close()
                self.resting.close()
                leftover = self.engine.stats().kv_bytes_total
                self.attached.__exit__(None, None, None)
                assert leftover == 0

    return Calls


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_random_calls(lab, tiny_model, family):
    # In float64 a sum in another order never changes which token is the likeliest.
    model = tiny_model(family, "sdpa", torch.float32 if family == "qwen3_next" else torch.float64)
    run_state_machine_as_test(caller(lab, model), settings=profile(max_examples=6, stateful_step_count=12))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "lfm2", "gemma4"])
def test_many_random_calls(lab, tiny_model, family):
    model = tiny_model(family, "sdpa", torch.float32 if family == "qwen3_next" else torch.float64)
    run_state_machine_as_test(caller(lab, model), settings=profile(max_examples=12, stateful_step_count=20))
