// The table of native ops. An op is a plain function over integers, numbers and pointers to arrays and descriptors (descriptors.h);
// `op_entry` derives from its parameter types how a flat array of slots is turned into arguments, so that a recorded call is
// (op, slots) and nothing else.
//
// To add an op: write `void my_op(float* out, const float* x, int64_t rows)` in a .cpp of csrc/ and, in the same file,
//     static const quire::OpEntry kOps[] = {quire::op_entry<&my_op>("my_op")};
//     static const quire::Register kRegister(kOps);
// CMake finds the file by itself. Ops that exist once per instruction set live in csrc/units/, whose .cpp files list theirs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "descriptors.h"

namespace quire {

// What is more than these belongs into a descriptor.
constexpr size_t kMostArguments = 10;

union Slot {
    int64_t i;
    double f;
};

// A pointer argument that may be null; plain pointer arguments are refused when null.
template <class T>
struct Optional {
    T* ptr;
};

struct OpEntry {
    const char* name;
    const char* signature;  // one letter per slot: p pointer, o pointer or null, i integer, f number
    void (*call)(const Slot*);
};

// Ops that a file of csrc/units has for one unit.
struct OpList {
    const OpEntry* ops;
    size_t count;
};

template <size_t N>
constexpr OpList list_of(const OpEntry (&ops)[N]) {
    return {ops, N};
}

// Throws std::invalid_argument with `message`.
[[noreturn]] void fail(const char* message);

template <class T>
struct SlotType;
template <>
struct SlotType<int64_t> {
    static constexpr char kLetter = 'i';
    static int64_t get(Slot s) { return s.i; }
};
template <>
struct SlotType<double> {
    static constexpr char kLetter = 'f';
    static double get(Slot s) { return s.f; }
};
template <class T>
struct SlotType<T*> {
    static constexpr char kLetter = 'p';
    static T* get(Slot s) { return reinterpret_cast<T*>(s.i); }
};
template <class T>
struct SlotType<Optional<T>> {
    static constexpr char kLetter = 'o';
    static Optional<T> get(Slot s) { return {reinterpret_cast<T*>(s.i)}; }
};

template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <size_t... I>
struct MakeIndices<0, I...> {
    using type = Indices<I...>;
};

template <auto Fn, class... Args>
struct OpCall {
    static_assert(sizeof...(Args) <= kMostArguments, "an op has too many arguments: put what is fixed into a descriptor");
    static constexpr char kSignature[] = {SlotType<Args>::kLetter..., '\0'};
    template <size_t... I>
    static void expand(const Slot* slots, Indices<I...>) {
        Fn(SlotType<Args>::get(slots[I])...);
    }
    static void call(const Slot* slots) { expand(slots, typename MakeIndices<sizeof...(Args)>::type{}); }
};

template <auto Fn, class... Args>
constexpr OpEntry make_entry(const char* name, void (*)(Args...)) {
    return {name, OpCall<Fn, Args...>::kSignature, &OpCall<Fn, Args...>::call};
}

// The table row of function `Fn`; a constant expression, so that a unit's table needs no code at load.
template <auto Fn>
constexpr OpEntry op_entry(const char* name) {
    return make_entry<Fn>(name, Fn);
}

// Adds a table of ops that exist once (not per instruction set); constructed as a static object.
struct Register {
    Register(const OpEntry* entries, size_t count);
    template <size_t N>
    explicit Register(const OpEntry (&entries)[N]) : Register(entries, N) {}
};

}  // namespace quire
