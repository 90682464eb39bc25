"""Images in S3 are read despite faults: a real server and pyarrow's client, with an unreliable proxy between them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import S3FileSystem

import mbaas
from mbaas.dataset import Dataset, SampleReader
from mbaas.dataset.storage.reader import ByteRange, FileReader
from mbaas.dataset.storage.retry import PatientReader, retrying
from mbaas.dataset.table import TableDataset
from mbaas.errors import BadSampleError, DatasetError
from support.s3 import Fault, Request, UnreliableProxy, unreliable

pytestmark = pytest.mark.slow

KEYS = sorted(f"train/{name}/{i:03}.jpg" for i in range(20) for name in ("ant", "bee"))
LENGTHS = {key: 20_000 + 311 * i for i, key in enumerate(KEYS)}
SETTINGS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_DEFAULT_REGION": "us-east-1"}


def content(key: str) -> bytes:
    return Random(key).randbytes(LENGTHS[key])


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """Address of an S3 server with a bucket of 40 objects."""
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="not-a-secret",
    )
    client.create_bucket(Bucket="photos")
    for key in KEYS:
        client.put_object(Bucket="photos", Key=key, Body=content(key))
    client.close()
    yield host, port
    moto.stop()


@pytest.fixture
def proxy(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[UnreliableProxy]:
    """Proxy without faults yet; the environment contains credentials."""
    for name, value in (SETTINGS | {"AWS_EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(name, value)
    with unreliable(server) as found:
        yield found


@pytest.fixture
def data(proxy: UnreliableProxy) -> TableDataset:
    """The listed bucket; the proxy has forgotten the requests."""
    found = mbaas.read_images(uri(proxy))
    proxy.forget()
    assert isinstance(found, TableDataset)
    return found


def uri(proxy: UnreliableProxy, path: str = "photos/train") -> str:
    return f"s3://{path}?endpoint_override=http://127.0.0.1:{proxy.port}&scheme=http"


def reader(data: TableDataset, pauses: list[float] | None = None, **policy: float) -> SampleReader:
    """A reader that records its pauses instead of sleeping."""
    noted = [] if pauses is None else pauses
    retry = retrying(**policy, sleep=noted.append)  # type: ignore[arg-type]
    return PatientReader(data.reader(), retry)


def read(reader: SampleReader, data: Dataset, sample_id: int) -> bytes:
    buffer = np.zeros(data.lengths(np.array([sample_id]))[0], np.uint8)
    reader.read_into(sample_id, buffer)
    return buffer.tobytes()


def answers(requests: list[Request]) -> list[tuple[str, int | Fault]]:
    return [(request.method, request.answer) for request in requests]


def test_a_bucket_is_listed_and_read_by_uri(data: TableDataset) -> None:
    assert data.root == "s3://photos/train"
    assert data.class_names == ("ant", "bee")
    assert [data.uri(i) for i in range(40)] == [f"s3://photos/{key}" for key in KEYS]
    assert data.lengths(np.arange(40)).tolist() == [LENGTHS[key] for key in KEYS]
    source = data.reader()
    assert [read(source, data, i) for i in range(40)] == [content(key) for key in KEYS]


def test_a_bucket_is_listed_and_read_by_file_system(proxy: UnreliableProxy) -> None:
    filesystem = S3FileSystem(endpoint_override=f"127.0.0.1:{proxy.port}", scheme="http")
    found = mbaas.read_images("photos/train", filesystem=filesystem)
    assert found.fingerprint == mbaas.read_images(uri(proxy)).fingerprint
    assert read(found.reader(), found, 7) == content(KEYS[7])


def test_a_copy_in_another_process_reads_too(data: TableDataset) -> None:
    copy = pickle.loads(pickle.dumps(data, protocol=5))
    assert read(copy.reader(), copy, 5) == content(KEYS[5])


def test_listing_takes_one_request_a_class_and_three_before(proxy: UnreliableProxy) -> None:
    mbaas.read_images(uri(proxy))
    assert len(proxy.requests()) == 3 + 2


def test_a_sample_takes_two_requests(data: TableDataset, proxy: UnreliableProxy) -> None:
    """HEAD returns the length, to detect an object that changed after listing; GET returns the bytes."""
    source = data.reader()
    for sample_id in range(40):
        read(source, data, sample_id)
    assert answers(proxy.requests()) == [("HEAD", 200), ("GET", 206)] * 40


def test_part_of_an_object_is_fetched_alone(data: TableDataset, proxy: UnreliableProxy) -> None:
    where = ByteRange("s3://photos/x", f"photos/{KEYS[3]}", offset=777, length=1_000, file_bytes=LENGTHS[KEYS[3]])
    buffer = np.zeros(1_000, np.uint8)
    FileReader(data.filesystem, lambda _: where).read_into(0, buffer)
    assert buffer.tobytes() == content(KEYS[3])[777:1_777]
    assert answers(proxy.requests()) == [("HEAD", 200), ("GET", 206)]


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.INTERNAL_ERROR, Fault.RESET, Fault.TORN])
def test_passing_faults_are_tried_again(data: TableDataset, proxy: UnreliableProxy, fault: Fault, method: str) -> None:
    """Two faults, then the bytes. A reset may cause one more request, because curl retries on a new connection."""
    pauses: list[float] = []
    proxy.fail("ant/004.jpg", fault, times=2, method="GET" if fault is Fault.TORN else method)
    source = reader(data, pauses)
    assert read(source, data, 4) == content(KEYS[4])
    assert len(proxy.requests("ant/004.jpg")) >= 4
    assert len([answer for _, answer in answers(proxy.requests()) if answer is fault]) == 2
    assert len(pauses) == 2 or fault is Fault.RESET
    assert all(0 <= pause < bound for pause, bound in zip(pauses, (0.2, 0.4), strict=False))


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        (Fault.SLOW_DOWN, r"AWS Error SLOW_DOWN during GetObject operation: injected"),
        (Fault.INTERNAL_ERROR, r"AWS Error INTERNAL_FAILURE during GetObject operation"),
        (Fault.RESET, r"AWS Error NETWORK_CONNECTION during GetObject operation: curlCode"),
    ],
)
def test_a_store_that_stays_broken_is_given_up_and_the_object_and_answer_are_named(
    data: TableDataset, proxy: UnreliableProxy, fault: Fault, answer: str
) -> None:
    pauses: list[float] = []
    proxy.fail("bee/001.jpg", fault, times=1_000, method="GET")
    source = reader(data, pauses, attempts=4)
    message = rf"s3://photos/train/bee/001\.jpg: reading failed: .*{answer}.* \(4 attempts in [\d.]+ (µs|ms|s)\)"
    with pytest.raises(BadSampleError, match=message):
        read(source, data, 21)
    assert len(pauses) == 3
    assert read(source, data, 22) == content(KEYS[22])


def test_the_clients_own_retries_do_not_multiply_with_ours(data: TableDataset, proxy: UnreliableProxy) -> None:
    """4 attempts are 4 requests without further pauses; the client created from a URI would send 30 in 6 s."""
    for copy in (data, pickle.loads(pickle.dumps(data))):
        proxy.fail("bee/001.jpg", Fault.SLOW_DOWN, times=1_000)
        begun, asked = time.monotonic(), len(proxy.requests())
        with pytest.raises(BadSampleError):
            read(reader(copy, attempts=4), copy, 21)
        assert answers(proxy.requests())[asked:] == [("HEAD", Fault.SLOW_DOWN)] * 4
        assert time.monotonic() - begun < 3


def test_a_patient_reader_waits_between_attempts_by_itself(data: TableDataset, proxy: UnreliableProxy) -> None:
    proxy.fail("ant/000.jpg", Fault.SLOW_DOWN, times=1)
    assert read(PatientReader(data.reader()), data, 0) == content(KEYS[0])


def test_what_no_retry_mends_is_asked_once(data: TableDataset, proxy: UnreliableProxy, server: tuple[str, int]) -> None:
    proxy.fail("ant/002.jpg", Fault.FORBIDDEN, times=1_000)
    with pytest.raises(BadSampleError, match=r"ant/002\.jpg: this process has no permission to read the file"):
        read(reader(data), data, 2)
    assert answers(proxy.requests("ant/002.jpg")) == [("HEAD", Fault.FORBIDDEN)]
    missing = replace(data.byte_range(2), path="photos/train/ant/999.jpg")
    with pytest.raises(BadSampleError, match="the file is gone since the dataset was listed"):
        read(FileReader(data.filesystem, lambda _: missing), data, 2)
    look_after_it = ("HEAD", 404)
    assert answers(proxy.requests("ant/999.jpg")) == [("HEAD", 404), look_after_it]


def test_an_object_that_changed_its_length_is_named(proxy: UnreliableProxy, server: tuple[str, int]) -> None:
    filesystem = S3FileSystem(endpoint_override=f"{server[0]}:{server[1]}", scheme="http")
    for name in ("one/a.jpg", "two/b.jpg"):
        with filesystem.open_output_stream(f"photos/changing/{name}") as file:
            file.write(b"x" * 100)
    data = mbaas.read_images(uri(proxy, "photos/changing"))
    for length in (99, 101):
        with filesystem.open_output_stream("photos/changing/one/a.jpg") as file:
            file.write(b"x" * length)
        with pytest.raises(BadSampleError, match=f"the file has {length} bytes now, 100 when the dataset was listed"):
            read(data.reader(), data, 0)
    assert read(data.reader(), data, 1) == b"x" * 100


def test_a_page_of_the_listing_that_fails_is_asked_again(proxy: UnreliableProxy) -> None:
    proxy.fail("prefix=train%2Fbee", Fault.SLOW_DOWN, times=1)
    assert len(mbaas.read_images(uri(proxy))) == 40
    assert [answer for _, answer in answers(proxy.requests("prefix=train%2Fbee"))] == [Fault.SLOW_DOWN, 200]


def test_a_listing_that_is_forbidden_names_the_folder(proxy: UnreliableProxy) -> None:
    proxy.fail("prefix=train%2Fbee", Fault.FORBIDDEN, times=1_000)
    with pytest.raises(DatasetError, match=r"cannot list s3://photos/train/bee: .*ACCESS_DENIED"):
        mbaas.read_images(uri(proxy))


def test_many_threads_share_a_reader_of_an_unreliable_store(data: TableDataset, proxy: UnreliableProxy) -> None:
    for number, fault in enumerate([Fault.SLOW_DOWN, Fault.INTERNAL_ERROR, Fault.RESET, Fault.TORN] * 2):
        proxy.fail(f"/{number:03}.jpg", fault, times=2)
    source = reader(data)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: read(source, data, i % 40), range(120)))
    assert found == [content(KEYS[i % 40]) for i in range(120)]


def test_a_throttled_store_gives_what_it_may_and_no_more(data: TableDataset, proxy: UnreliableProxy) -> None:
    """8 threads read 40 objects of 1.04 MB in total at 2 MB/s, which takes about half a second."""
    proxy.throttle(2e6)
    source = data.reader()
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: read(source, data, i), range(40)))
    elapsed_s = time.monotonic() - begun
    expected_s = sum(LENGTHS.values()) / 2e6
    assert expected_s * 0.95 < elapsed_s < expected_s * 4
