// The Python face: `call` runs one op, `Program` records calls and replays them all in one call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
// nanobind's own arrays cost 5 us an argument; this is a field of numpy's struct.
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "matrix.h"
#include "pool.h"
#include "registry.h"
#include "sharing.h"
#include "sparse.h"

namespace nb = nanobind;

namespace quire {
namespace {

struct Table {
    std::vector<OpEntry> ops;
    std::vector<std::string> names;
};

Table& table() {
    static Table instance;
    return instance;
}

void add(const char* unit, const OpEntry* entries, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        table().ops.push_back(entries[i]);
        table().names.push_back(unit ? std::string(unit) + "/" + entries[i].name : entries[i].name);
    }
}

const OpEntry& entry(int64_t id) {
    const auto& ops = table().ops;
    if (id < 0 || static_cast<size_t>(id) >= ops.size()) throw std::invalid_argument("unknown op id " + std::to_string(id));
    return ops[static_cast<size_t>(id)];
}

constexpr size_t kMaxSlots = 40;

bool load_numpy() {
    import_array1(false);
    return true;
}

// A pointer argument: an address, None for null, or an array of numpy's, whose memory is meant. False for anything else.
bool read_pointer(PyObject* item, Slot& out) {
    if (PyArray_Check(item)) {
        out.i = reinterpret_cast<int64_t>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(item)));
        return true;
    }
    if (item == Py_None) {
        out.i = 0;
        return true;
    }
    return false;
}

// Reads `args` by the op's signature; throws on a wrong count, type or null pointer.
size_t read_slots(int64_t id, nb::tuple args, Slot* out) {
    const OpEntry& op = entry(id);
    const size_t count = args.size();
    const auto bad = [&](const std::string& why) {
        throw std::invalid_argument("op " + table().names[static_cast<size_t>(id)] + "(" + op.signature + "): " + why);
    };
    if (std::char_traits<char>::length(op.signature) != count || count > kMaxSlots)
        bad("got " + std::to_string(count) + " arguments");
    for (size_t i = 0; i < count; ++i) {
        PyObject* item = PyTuple_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i));
        const char kind = op.signature[i];
        if (kind == 'f') {
            out[i].f = PyFloat_AsDouble(item);
        } else if (kind == 'i' || !read_pointer(item, out[i])) {
            out[i].i = PyLong_AsLongLong(item);
        }
        if (PyErr_Occurred()) {
            PyErr_Clear();
            bad("argument " + std::to_string(i) + " has the wrong type or range");
        }
        if (kind == 'p' && out[i].i == 0) bad("argument " + std::to_string(i) + " is a null pointer");
    }
    return count;
}

void call(int64_t id, nb::tuple args) {
    Slot slots[kMaxSlots];
    read_slots(id, args, slots);
    const auto run = entry(id).call;
    nb::gil_scoped_release release;
    const SameThreads same;
    run(slots);
}

class Program {
   public:
    void add(int64_t id, nb::tuple args) {
        Slot slots[kMaxSlots];
        const size_t count = read_slots(id, args, slots);
        calls_.push_back({entry(id).call, slots_.size()});
        slots_.insert(slots_.end(), slots, slots + count);
    }

    void run() const {
        nb::gil_scoped_release release;
        const SameThreads same;
        for (const Call& c : calls_) c.run(slots_.data() + c.slots);
    }

    size_t size() const { return calls_.size(); }

   private:
    struct Call {
        void (*run)(const Slot*);
        size_t slots;
    };
    std::vector<Call> calls_;
    std::vector<Slot> slots_;
};

nb::dict ops_of(const std::string& unit) {
    nb::dict out;
    const auto& names = table().names;
    for (size_t i = 0; i < names.size(); ++i) {
        const size_t slash = names[i].find('/');
        if (slash == std::string::npos) {
            out[names[i].c_str()] = i;
        } else if (names[i].compare(0, slash, unit) == 0) {
            out[names[i].c_str() + slash + 1] = i;
        }
    }
    return out;
}

nb::list units() {
    nb::list out;
    for (const Unit& unit : supported_units()) out.append(unit.name);
    return out;
}

nb::list kinds() {
    nb::list out;
    for (const KindFacts& kind : kKindFacts) {
        nb::list groups, parts, always;
        for (int group = kind.least_group; group && group <= kind.most_group; group *= 2) groups.append(group);
        const auto add_part = [&](const char* name, Has has) {
            if (has != Has::kNo) parts.append(name);
            if (has == Has::kMust) always.append(name);
        };
        add_part("scales", kind.most_group ? Has::kMust : Has::kNo);
        add_part("zeros", kind.zeros);
        add_part("mins", kind.mins);
        add_part("table", kind.table);
        add_part("order", kind.order);
        out.append(nb::make_tuple(kind.name, kind.bits, kind.together, kind.codes, kind.packer, nb::tuple(groups), nb::tuple(parts),
                                  nb::tuple(always), kind.fuses, kind.multiples));
    }
    return out;
}

}  // namespace

void fail(const char* message) { throw std::invalid_argument(message); }

Register::Register(const OpEntry* entries, size_t count) { add(nullptr, entries, count); }

NB_MODULE(_native, m) {
    m.doc() = "Native ops of the CPU backend: integers, numbers, addresses and arrays in, results in the caller's memory.";
    if (!load_numpy()) throw nb::python_error();
    for (const Unit& unit : supported_units()) {
        for (const OpList* const* list = unit.ops; *list; ++list) add(unit.name, (*list)->ops, (*list)->count);
    }
    m.def("units", &units, "Instruction-set units this machine can run, best first.");
    m.def("ops", &ops_of, nb::arg("unit"), "Op name -> id, for the ops of `unit` and those that exist once.");
    m.def("kinds", &kinds, "The rows of csrc/kinds.inc, by the number of the kind.");
    m.def("expands", [] { return g_expands; }, "Whether bytes are expanded by a mask in one instruction (AVX-512 VBMI2).");
    m.def("call", &call, nb::arg("id"), nb::arg("args"), "Run one op; raises ValueError on bad arguments.");
    m.def("threads", &thread_count, "Threads that run an op.");
    m.def("set_threads", &set_thread_count, nb::arg("threads"), nb::arg("pin") = false,
          "Set the number of threads (0: all cores of the affinity mask), optionally pinned to cores.");
    m.def(
        "advise_huge", [](uintptr_t address, size_t bytes) { advise_huge(reinterpret_cast<void*>(address), bytes); },
        nb::arg("address"), nb::arg("bytes"), "Ask for huge pages in a range of memory.");
    m.def("tiles_read", [] { return __atomic_load_n(&g_tiles_read, __ATOMIC_RELAXED); },
          "Tiles of 64 keys and values of a head that attention has read since the start.");
    nb::class_<Program>(m, "Program", "A recorded sequence of op calls.")
        .def(nb::init<>())
        .def("add", &Program::add, nb::arg("id"), nb::arg("args"), "Append a call; its arguments are checked now.")
        .def("run", &Program::run, "Run all calls in order with the interpreter lock released.")
        .def("__len__", &Program::size);
}

}  // namespace quire
