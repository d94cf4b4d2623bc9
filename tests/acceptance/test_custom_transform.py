"""examples/custom_transform.py: transforms of three kinds."""

import custom_transform as custom
import pytest

from torchwrap.testing import check_transform


@pytest.mark.long
@pytest.mark.full
def test_example_runs_and_checks_each_transform(monkeypatch, capsys):
    checked = []

    def check(make, *arguments):
        checked.append(make)
        check_transform(make, *arguments)

    monkeypatch.setattr(custom, "check_transform", check)
    custom.main()
    assert checked == [custom.Progress, custom.SwitchCost, custom.Novelty]
    before, after = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert before > after > 0.9
