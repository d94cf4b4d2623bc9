"""examples/quickstart.ipynb: it has its outputs, and runs again."""

import json

import pytest
from helpers import EXAMPLES

PATH = EXAMPLES / "quickstart.ipynb"


def test_notebook_has_outputs_and_pictures_and_is_below_500_kilobytes():
    cells = json.loads(PATH.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "image/gif", "text/plain"} <= kinds and PATH.stat().st_size < 500_000
    assert not [
        output
        for output in outputs
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter
def test_notebook_runs_and_its_policy_balances_the_pole():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(PATH, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}
    ).execute()
    (result,) = [cell.outputs[-1] for cell in notebook.cells if "results[" in cell.source]
    assert float(result["data"]["text/plain"].strip("tensor()")) > 400
