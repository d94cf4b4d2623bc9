"""examples/quickstart.ipynb: it has its outputs, and runs again."""

import json

import pytest
from helpers import EXAMPLES

PATH = EXAMPLES / "quickstart.ipynb"


def test_notebook_has_outputs_and_pictures_and_is_below_500_kilobytes():
    assert PATH.stat().st_size < 500_000
    cells = json.loads(PATH.read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(codes, 1):
        assert cell["execution_count"] == number
    kinds = set()
    for cell in codes:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"
            kinds.update(output.get("data", {}))
    assert {"image/png", "image/gif", "text/plain"} <= kinds


@pytest.mark.long
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter
def test_notebook_runs_and_its_policy_balances_the_pole():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(PATH, as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    (cell,) = [cell for cell in notebook.cells if "results[" in cell.source]
    printed = cell.outputs[-1]["data"]["text/plain"]
    assert float(printed.strip("tensor()")) > 400
