"""Records of what was measured: lines of JSON, each with the environment it was made in."""

import json


def write(path, records, environment):
    """Write records to `path`, if there is one, each as soon as it is made.

    So a run that is stopped leaves those that it had made.

    :return: A list of the records.
    """

    if path is None:
        return list(records)

    path.parent.mkdir(parents=True, exist_ok=True)
    written = []

    with path.open("w", encoding="utf-8") as file:
        for record in records:
            line = json.dumps({**record, "environment": environment})
            print(line, file=file, flush=True)
            written.append(record)

    return written


def read(path):
    """The records of a file, in the form that the scripts write now."""

    with open(path, encoding="utf-8") as file:
        return [_in_the_present_form(json.loads(line)) for line in file]


def _in_the_present_form(record):
    """Files of 2026-11-30 name times and environments otherwise."""

    if "environment" not in record and "commit" in record:
        names = ("date", "python", "commit", "torch", "triton", "ninetoothed")
        names += ("ntops-ext", "gpu", "driver")
        record["environment"] = {name: record.pop(name) for name in names}

    if record.get("benchmark") == "rope_pack" and "times" not in record:
        earlier = {
            "copy": {"cold_us": "floor_us"},
            "ntops_ext": {
                "cold_us": "device_us",
                "warm_us": "warm_us",
                "host_us": "host_us",
            },
            "eager": {"cold_us": "eager_us"},
        }
        times = {
            name: {new: record.pop(old) for new, old in keys.items() if old in record}
            for name, keys in earlier.items()
        }
        record["times"] = {name: row for name, row in times.items() if row}
        record["case"] = record.pop("name")

    return record


def label(record):
    """What a record of a benchmark was measured on, in words."""

    if record["benchmark"] == "rope_pack":
        return record["case"].replace("_", " ")

    shape = "x".join(map(str, record["shape"]))
    parts = [part for part in record["mode"].split(", ") if part != "silu"]

    if record["layout"] != "dense":
        parts.append(record["layout"])

    return ", ".join([shape, *parts])
