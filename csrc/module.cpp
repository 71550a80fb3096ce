// The Python module `quire._native`: `call` runs one op, `Program` records calls and replays them all in one call. It is written in
// CPython's limited API, so that one build serves every Python from 3.11 on.
#include <Python.h>
// An array's address is a field of numpy's struct, read in 2 ns; the buffer protocol takes 50 ns for one.
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "facts.h"
#include "isa.h"
#include "matrix.h"
#include "op_table.h"
#include "pool.h"
#include "sharing.h"
#include "sparse.h"

namespace quire {
namespace {

// Thrown where the interpreter has an error set.
struct PythonError {};

struct Release {
    void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

Owned owned(PyObject* object) {
    if (!object) throw PythonError();
    return Owned(object);
}

void checked(int status) {
    if (status < 0) throw PythonError();
}

// What `body` returns; an exception of C++ becomes one of Python, and the return value nullptr.
template <class F>
inline PyObject* guarded(const F& body) {
    try {
        return body();
    } catch (const PythonError&) {
    } catch (const std::bad_alloc& error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::length_error& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::out_of_range& error) {
        PyErr_SetString(PyExc_IndexError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyObject* none() {
    Py_INCREF(Py_None);
    return Py_None;
}

// While one is there, other threads of Python run.
class WithoutInterpreter {
   public:
    WithoutInterpreter() : state_(PyEval_SaveThread()) {}
    ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
    WithoutInterpreter(const WithoutInterpreter&) = delete;
    WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

   private:
    PyThreadState* state_;
};

// The arguments of `call` and `Program.add`.
struct Asked {
    const TableOp& op;
    PyObject* args;
};

// (id, args) by place or by name, as METH_FASTCALL | METH_KEYWORDS has them.
Asked read_asked(PyObject* const* given, Py_ssize_t count, PyObject* names) {
    PyObject* found[2] = {};
    const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    bool fits = count + named == 2;
    for (Py_ssize_t i = 0; fits && i < count; ++i) found[i] = given[i];
    for (Py_ssize_t i = 0; fits && i < named; ++i) {
        PyObject* name = PyTuple_GetItem(names, i);
        const int place = PyUnicode_CompareWithASCIIString(name, "id") == 0 ? 0 : PyUnicode_CompareWithASCIIString(name, "args") == 0 ? 1 : -1;
        fits = place >= 0 && !found[place];
        if (fits) found[place] = given[count + i];
    }
    if (!fits || !PyTuple_Check(found[1])) {
        PyErr_SetString(PyExc_TypeError, "a call is (id, args): the number of an op and a tuple");
        throw PythonError();
    }
    const long long id = PyLong_AsLongLong(found[0]);
    if (id == -1 && PyErr_Occurred()) throw PythonError();
    return {op_of_id(id), found[1]};
}

// A pointer argument: an address, None for null, or an array of numpy's, whose memory is meant.
int64_t read_pointer(PyObject* item) {
    if (PyLong_CheckExact(item)) return PyLong_AsLongLong(item);
    if (PyArray_Check(item)) return reinterpret_cast<int64_t>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(item)));
    return item == Py_None ? 0 : PyLong_AsLongLong(item);
}

// Reads `args` by the op's signature; throws on a wrong count, type or null pointer.
void read_slots(const Asked& asked, Slot* out) {
    const TableOp& op = asked.op;
    const Py_ssize_t count = PyTuple_Size(asked.args);
    if (count != op.arguments) refuse(op, "got " + std::to_string(count) + " arguments");
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* item = PyTuple_GetItem(asked.args, i);
        const char kind = op.signature[i];
        bool failed;
        if (kind == 'f') {
            out[i].f = PyFloat_AsDouble(item);
            failed = out[i].f == -1.0;
        } else {
            out[i].i = kind == 'i' ? PyLong_AsLongLong(item) : read_pointer(item);
            failed = out[i].i == -1;
        }
        if (failed && PyErr_Occurred()) {
            PyErr_Clear();
            refuse(op, "argument " + std::to_string(i) + " has the wrong type or range");
        }
        if (kind == 'p' && out[i].i == 0) refuse(op, "argument " + std::to_string(i) + " is a null pointer");
    }
}

PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
    return guarded([&] {
        const Asked asked = read_asked(given, count, names);
        Slot slots[kMostArguments];
        read_slots(asked, slots);
        {
            const WithoutInterpreter released;
            const SameThreads same;
            asked.op.call(slots);
        }
        return none();
    });
}

class Program {
   public:
    void add(const Asked& asked) {
        Slot slots[kMostArguments];
        read_slots(asked, slots);
        calls_.push_back({asked.op.call, slots_.size()});
        slots_.insert(slots_.end(), slots, slots + asked.op.arguments);
    }

    void run() const {
        const WithoutInterpreter released;
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

struct ProgramObject {
    PyObject_HEAD
    Program program;
};

Program& program_of(PyObject* self) { return reinterpret_cast<ProgramObject*>(self)->program; }

PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject* named) {
    if (PyTuple_Size(args) > 0 || (named && PyDict_Size(named) > 0)) {
        PyErr_SetString(PyExc_TypeError, "Program() takes no arguments");
        return nullptr;
    }
    PyObject* self = PyType_GenericAlloc(type, 0);
    if (self) new (&program_of(self)) Program();
    return self;
}

void program_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    program_of(self).~Program();
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyObject* program_add(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* names) {
    return guarded([&] {
        program_of(self).add(read_asked(given, count, names));
        return none();
    });
}

PyObject* program_run(PyObject* self, PyObject*) {
    return guarded([&] {
        program_of(self).run();
        return none();
    });
}

Py_ssize_t program_size(PyObject* self) { return static_cast<Py_ssize_t>(program_of(self).size()); }

PyObject* units(PyObject*, PyObject*) {
    return guarded([] {
        Owned out = owned(PyList_New(0));
        for (const Unit& unit : supported_units()) checked(PyList_Append(out.get(), owned(PyUnicode_FromString(unit.name)).get()));
        return out.release();
    });
}

PyObject* ops(PyObject*, PyObject* args, PyObject* named) {
    return guarded([&] {
        static const char* const names[] = {"unit", nullptr};
        const char* asked = nullptr;
        if (!PyArg_ParseTupleAndKeywords(args, named, "s:ops", const_cast<char**>(names), &asked)) throw PythonError();
        const std::string unit = asked;
        Owned out = owned(PyDict_New());
        for (size_t id = 0; id < op_table().size(); ++id) {
            const TableOp& op = op_table()[id];
            if (*op.unit && unit != op.unit) continue;
            checked(PyDict_SetItemString(out.get(), op.name, owned(PyLong_FromSize_t(id)).get()));
        }
        return out.release();
    });
}

PyObject* tuple_of(const std::vector<const char*>& texts) {
    Owned out = owned(PyTuple_New(static_cast<Py_ssize_t>(texts.size())));
    for (size_t i = 0; i < texts.size(); ++i)
        checked(PyTuple_SetItem(out.get(), static_cast<Py_ssize_t>(i), owned(PyUnicode_FromString(texts[i])).release()));
    return out.release();
}

PyObject* groups_of(const KindFacts& kind) {
    Owned out = owned(PyList_New(0));
    for (int group = kind.least_group; group && group <= kind.most_group; group *= 2)
        checked(PyList_Append(out.get(), owned(PyLong_FromLong(group)).get()));
    return owned(PyList_AsTuple(out.get())).release();
}

PyObject* kind_row(const KindFacts& kind) {
    std::vector<const char*> parts, always;
    const auto add_part = [&](const char* name, Has has) {
        if (has != Has::kNo) parts.push_back(name);
        if (has == Has::kMust) always.push_back(name);
    };
    add_part("scales", kind.most_group ? Has::kMust : Has::kNo);
    add_part("zeros", kind.zeros);
    add_part("mins", kind.mins);
    add_part("table", kind.table);
    add_part("order", kind.order);
    const Owned groups(groups_of(kind)), may(tuple_of(parts)), must(tuple_of(always));
    return Py_BuildValue("(siissOOOOi)", kind.name, kind.bits, kind.together, kind.codes, kind.packer, groups.get(), may.get(), must.get(),
                         kind.fuses ? Py_True : Py_False, kind.multiples);
}

PyObject* kinds(PyObject*, PyObject*) {
    return guarded([] {
        Owned out = owned(PyList_New(0));
        for (const KindFacts& kind : kKindFacts) checked(PyList_Append(out.get(), owned(kind_row(kind)).get()));
        return out.release();
    });
}

PyObject* facts(PyObject*, PyObject*) {
    return guarded([] {
        Owned out = owned(PyDict_New());
        for (const Fact& fact : kFacts) checked(PyDict_SetItemString(out.get(), fact.name, owned(PyLong_FromLongLong(fact.value)).get()));
        return out.release();
    });
}

PyObject* expands(PyObject*, PyObject*) { return PyBool_FromLong(g_expands); }

PyObject* threads(PyObject*, PyObject*) { return PyLong_FromLong(thread_count()); }

PyObject* set_threads(PyObject*, PyObject* args, PyObject* named) {
    return guarded([&] {
        static const char* const names[] = {"threads", "pin", nullptr};
        int count = 0;
        PyObject* pin = Py_False;
        if (!PyArg_ParseTupleAndKeywords(args, named, "i|O!:set_threads", const_cast<char**>(names), &count, &PyBool_Type, &pin))
            throw PythonError();
        set_thread_count(count, pin == Py_True);
        return none();
    });
}

PyObject* advise_huge(PyObject*, PyObject* args, PyObject* named) {
    return guarded([&] {
        static const char* const names[] = {"address", "bytes", nullptr};
        PyObject *address = nullptr, *bytes = nullptr;
        if (!PyArg_ParseTupleAndKeywords(args, named, "OO:advise_huge", const_cast<char**>(names), &address, &bytes)) throw PythonError();
        const size_t at = PyLong_AsSize_t(owned(PyNumber_Index(address)).get());
        if (PyErr_Occurred()) throw PythonError();
        const size_t size = PyLong_AsSize_t(owned(PyNumber_Index(bytes)).get());
        if (PyErr_Occurred()) throw PythonError();
        quire::advise_huge(reinterpret_cast<void*>(at), size);
        return none();
    });
}

PyObject* tiles_read(PyObject*, PyObject*) { return PyLong_FromLongLong(__atomic_load_n(&g_tiles_read, __ATOMIC_RELAXED)); }

// A function of any of the forms that METH_... names, as tables of methods keep them.
template <class F>
PyCFunction as_method(F* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

constexpr int kFast = METH_FASTCALL | METH_KEYWORDS, kNamed = METH_VARARGS | METH_KEYWORDS;

// What stands before "--" is the signature that Python shows.
PyMethodDef g_functions[] = {
    {"units", as_method(&units), METH_NOARGS, "units($module)\n--\n\nInstruction-set units this machine can run, best first."},
    {"ops", as_method(&ops), kNamed, "ops($module, unit)\n--\n\nOp name -> id, for the ops of `unit` and those that exist once."},
    {"kinds", as_method(&kinds), METH_NOARGS, "kinds($module)\n--\n\nThe rows of csrc/kinds.inc, by the number of the kind."},
    {"facts", as_method(&facts), METH_NOARGS, "facts($module)\n--\n\nThe numbers of csrc/facts.h by their names."},
    {"expands", as_method(&expands), METH_NOARGS,
     "expands($module)\n--\n\nWhether bytes are expanded by a mask in one instruction (AVX-512 VBMI2)."},
    {"call", as_method(&call), kFast, "call($module, id, args)\n--\n\nRun one op; raises ValueError on bad arguments."},
    {"threads", as_method(&threads), METH_NOARGS, "threads($module)\n--\n\nThreads that run an op."},
    {"set_threads", as_method(&set_threads), kNamed,
     "set_threads($module, threads, pin=False)\n--\n\nSet the number of threads (0: all cores of the affinity mask), optionally pinned to "
     "cores."},
    {"advise_huge", as_method(&advise_huge), kNamed, "advise_huge($module, address, bytes)\n--\n\nAsk for huge pages in a range of memory."},
    {"tiles_read", as_method(&tiles_read), METH_NOARGS,
     "tiles_read($module)\n--\n\nTiles of 64 keys and values of a head that attention has read since the start."},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef g_program_methods[] = {
    {"add", as_method(&program_add), kFast, "add($self, id, args)\n--\n\nAppend a call; its arguments are checked now."},
    {"run", as_method(&program_run), METH_NOARGS, "run($self)\n--\n\nRun all calls in order with the interpreter lock released."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot g_program_slots[] = {
    {Py_tp_doc, const_cast<char*>("Program()\n--\n\nA recorded sequence of op calls.")},
    {Py_tp_new, reinterpret_cast<void*>(&program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&program_dealloc)},
    {Py_tp_methods, g_program_methods},
    {Py_sq_length, reinterpret_cast<void*>(&program_size)},
    {0, nullptr},
};
PyType_Spec g_program_type = {"quire._native.Program", sizeof(ProgramObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, g_program_slots};

// numpy's table of functions and types, which PyArray_Check asks.
int load_numpy() {
    import_array1(-1);
    return 0;
}

int fill_module(PyObject* module) {
    const PyObject* filled = guarded([&] {
        checked(load_numpy());
        op_table();
        checked(PyModule_AddObjectRef(module, "Program", owned(PyType_FromSpec(&g_program_type)).get()));
        return module;
    });
    return filled ? 0 : -1;
}

PyModuleDef_Slot g_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(&fill_module)}, {0, nullptr}};
PyModuleDef g_module = {PyModuleDef_HEAD_INIT,
                        "_native",
                        "Native ops of the CPU backend: integers, numbers, addresses and arrays in, results in the caller's memory.",
                        0,
                        g_functions,
                        g_slots,
                        nullptr,
                        nullptr,
                        nullptr};

}  // namespace
}  // namespace quire

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&quire::g_module); }
