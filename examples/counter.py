"""A counter that survives: python examples/counter.py, with the package of bindings/python."""
import mojim

with mojim.attach("mojim.toml", "a") as volume:
    runs = volume.array("counter", "i8", 1)  # a NumPy array over the file "counter"
    with volume.atomic():  # atomic, durable, replicated
        runs[0] += 1
    print("run", runs[0])
