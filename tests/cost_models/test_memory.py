"""Memory figures by hand."""

from floorplan.cost_models import memory
from floorplan.cost_models.memory import ReplaySite, SavedBytes


def test_a_storage_counts_once_and_a_tensor_as_often_as_it_is_saved() -> None:
    kept = [SavedBytes(0, 100, 100), SavedBytes(0, 100, 40), SavedBytes(1, 8, 8)]
    assert memory.saved(kept) == 108
    assert memory.saved_refcount(kept) == 148
    assert memory.saved([]) == memory.saved_refcount([]) == 0


def test_adam_keeps_two_moments_of_what_trains() -> None:
    assert memory.optimizer_state(24) == 48
    assert memory.training_state_peak(1000, 24, 300) == 1000 + 48 + 300


def test_a_replay_holds_all_captured_gradients_and_one_input() -> None:
    first, last = ReplaySite(captured=10, projection=4, entered=100), ReplaySite(captured=20, projection=6, entered=50)
    assert memory.replay_peak([first]) == 10 + 4 + 100
    assert memory.replay_peak([first, last]) == max(30 + 4 + 100, 30 + 4 + 6 + 50)
    assert memory.replay_peak([ReplaySite(10, 4, 0), ReplaySite(20, 6, 0)]) == 30 + 4 + 6
    assert memory.replay_peak([]) == 0
