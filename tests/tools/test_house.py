"""What is counted of the house."""

from pathlib import Path

from tools.house import double_names, generators, num_lines, settings, way_of_a_request

ROOT = Path(__file__).parents[2]


def test_a_request_crosses_the_modules_of_its_processes_and_what_they_import() -> None:
    names = {str(file.relative_to(ROOT)) for file in way_of_a_request(ROOT).files}
    assert {"serve_app/api/routes.py", "deployments/talker/scheduler.py"} <= names
    assert not {"serve_app/cli/main.py", "deployments/codec/deployment.py", "deployments/__init__.py"} & names


def test_the_listed_generators_exist() -> None:
    assert generators(ROOT)


def test_a_class_name_in_two_files_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Twice: ...\nclass Once: ...\n")
    (tmp_path / "b.py").write_text("class Twice: ...\n")
    assert double_names(tmp_path.glob("*.py")) == ["Twice"]


def test_settings_are_the_leaves_of_the_configuration() -> None:
    names = settings(ROOT)
    assert {"model", "talker.max_num_seqs", "api.admission.max_streams"} <= set(names)
    assert not {"talker", "api", "api.admission"} & set(names)


def test_all_lines_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Says."""\n\nx = 1\n')
    assert num_lines([tmp_path / "a.py"]) == 3
