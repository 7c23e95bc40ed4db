"""The built-in data sources read what they should and say what is wrong with the rest."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.backends.data.hf_datasets import DatasetsSource
from hybridflow.backends.data.jsonl import JsonlSource
from hybridflow.backends.data.parquet import ParquetSource
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.core.plugins.resolve import load_source

ROWS = [{"prompt": "2+2=", "n": 4}, {"prompt": "größer ’ 日本", "n": None}]
FILES = {"jsonl": (JsonlSource, ".jsonl"), "parquet": (ParquetSource, ".parquet")}


def config(path, source="jsonl", **options):
    return DataConfig(source=source, path=None if path is None else str(path), options=options)


def read(source):
    return [source[i] for i in range(len(source))]


def test_jsonl_reads_plain_and_gzipped_files_and_skips_blank_lines(tmp_path):
    text = "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n"
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    assert read(JsonlSource(config(tmp_path / "a.jsonl"))) == ROWS
    assert read(JsonlSource(config(tmp_path / "a.jsonl.gz"))) == ROWS


@pytest.mark.parametrize(
    "content, words",
    [
        (b'{"a": 1}\n\n{"a": \n', r"a\.jsonl, line 3: not JSON"),
        (b'{"a": 1}\n[1]\n', r"a\.jsonl, line 2: must be a JSON object.*\[1\]"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"a\.jsonl, line 2: not UTF-8"),
        (b"", "is empty"),
        (b"\n \n", "only blank lines"),
    ],
)
def test_jsonl_names_the_file_and_line_that_it_cannot_read(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        JsonlSource(config(tmp_path / "a.jsonl"))


def test_a_gzip_file_that_is_cut_is_named(tmp_path):
    whole = gzip.compress(b'{"a": 1}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read after line \d+.*complete"):
        JsonlSource(config(tmp_path / "a.jsonl.gz"))
    (tmp_path / "b.jsonl.gz").write_bytes(b'{"a": 1}\n')
    with pytest.raises(DataError, match=r"b\.jsonl\.gz cannot be read"):
        JsonlSource(config(tmp_path / "b.jsonl.gz"))


@pytest.mark.parametrize("name", FILES)
def test_a_path_that_is_missing_wrong_or_empty_says_what_to_do(tmp_path, name):
    kind, ending = FILES[name]
    (tmp_path / "data.csv").write_text("a,b\n")
    (tmp_path / f"empty{ending}").write_text("")
    for path, words in [
        (None, "set data.path"),
        (tmp_path / "no" / f"x{ending}", rf"there is no .*x{ending}.* has data\.csv, empty{ending}"),
        (tmp_path / "data.csv", rf"does not end in {ending}.*data\.source = "),
        (tmp_path / f"empty{ending}", "is empty"),
    ]:
        with pytest.raises(DataError, match=words):
            kind(config(path, name))


def test_jsonl_does_not_read_folders_and_sources_refuse_unknown_options(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        JsonlSource(config(tmp_path))
    with pytest.raises(ConfigError, match=r"no option 'columns' \(options: none\)"):
        JsonlSource(config(tmp_path, columns="a"))


def test_parquet_reads_a_file_and_a_folder_in_the_order_of_names(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, row in zip(("b", "a"), ROWS, strict=True):
        pq.write_table(
            pa.Table.from_pylist([row], schema=pa.schema({"prompt": "string", "n": "int64"})),
            tmp_path / f"{name}.parquet",
        )
    assert read(ParquetSource(config(tmp_path / "b.parquet"))) == ROWS[:1]
    assert read(ParquetSource(config(tmp_path))) == ROWS[::-1]


def test_parquet_files_that_are_broken_empty_or_different_are_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"broken\.parquet is not a readable Parquet file"):
        ParquetSource(config(tmp_path / "broken.parquet"))
    (tmp_path / "broken.parquet").unlink()
    with pytest.raises(DataError, match=r"has no \*\.parquet"):
        ParquetSource(config(tmp_path))
    pq.write_table(pa.table({"a": pa.array([], "int64")}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="has no rows"):
        ParquetSource(config(tmp_path / "none.parquet"))
    pq.write_table(pa.table({"b": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="different columns"):
        ParquetSource(config(tmp_path))


def test_datasets_reads_a_saved_folder_and_one_of_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert read(DatasetsSource(config(tmp_path / "one"))) == ROWS
    assert read(DatasetsSource(config(tmp_path / "two", split="test"))) == ROWS[1:]
    with pytest.raises(DataError, match=r"has the splits train, test; set data.options.split"):
        DatasetsSource(config(tmp_path / "two"))
    with pytest.raises(DataError, match=r"no split 'tests'; did you mean 'test'\? \(splits: train, test\)"):
        DatasetsSource(config(tmp_path / "two", split="tests"))
    with pytest.raises(DataError, match="has no splits; remove the option"):
        DatasetsSource(config(tmp_path / "one", split="test"))
    data.select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match=r"none.*at least one row"):
        DatasetsSource(config(tmp_path / "none"))


def test_datasets_says_what_it_reads_when_given_something_else(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r"cannot be loaded by the datasets library.*save_to_disk"):
        DatasetsSource(config(tmp_path))
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r'is a file.*data\.source = "jsonl"'):
        DatasetsSource(config(tmp_path / "a.jsonl"))


def test_arithmetic_splits_all_sums_into_two_sets_without_a_common_row():
    held_out, train, everything = (
        read(ArithmeticSource(config(None, "arithmetic", split=split))) for split in ("held-out", "train", "all")
    )
    assert len(held_out) == 500 and len(train) == 9500
    pairs = [(row["a"], row["b"]) for row in held_out + train]
    assert sorted(pairs) == [(a, b) for a in range(100) for b in range(100)]
    assert everything[17 * 100 + 5] == {"a": 17, "b": 5, "prompt": "17+05=", "answer": "022"}
    assert all(eval(f"{r['a']}+{r['b']}") == int(r["answer"]) and len(r["answer"]) == 3 for r in everything)


def test_the_split_of_arithmetic_depends_on_its_seed_alone():
    def rows(**options):
        return read(ArithmeticSource(config(None, "arithmetic", split="held-out", **options)))

    assert rows() == rows(split_seed=0, held_out=500)
    assert rows() != rows(split_seed=1)
    assert rows(held_out=3) == rows()[:3]


def test_arithmetic_may_be_cut_to_its_first_rows():
    few = read(ArithmeticSource(config(None, "arithmetic", rows=7)))
    assert few == read(ArithmeticSource(config(None, "arithmetic")))[:7]
    assert len(read(ArithmeticSource(config(None, "arithmetic", split="held-out", rows=1_000)))) == 500


def test_arithmetic_refuses_options_that_make_no_split():
    with pytest.raises(ConfigError) as caught:
        ArithmeticSource(config(None, "arithmetic", split="test", held_out=10_000, split_seed=-1, rows=10_001))
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    "name, kind",
    [
        ("jsonl", JsonlSource),
        ("parquet", ParquetSource),
        ("datasets", DatasetsSource),
        ("arithmetic", ArithmeticSource),
    ],
)
def test_the_built_in_sources_are_found_by_name(name, kind):
    from hybridflow.core.plugins import registry

    assert registry().get("data_source", name) is kind
    if name == "arithmetic":
        assert len(load_source(config(None, name))) == 9500


def test_listing_the_built_in_plugins_imports_nothing_heavy():
    code = (
        "import sys, hybridflow.backends.data.plugin, hybridflow.backends.rewards.plugin\n"
        "bad = {'torch', 'datasets', 'pyarrow', 'math_verify', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
