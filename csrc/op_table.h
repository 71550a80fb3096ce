// The table of ops by their ids, for the Python module (module.cpp) and for the program that emulators run (csrc/emulate).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "registry.h"

namespace quire {

struct TableOp {
    const char* unit;  // "": the op exists once
    const char* name;
    const char* signature;  // a letter for each argument, see registry.h
    int64_t arguments;
    void (*call)(const Slot*);
};

// Ops that exist once, then those of each unit that this machine runs, best first. The id of an op is its place.
const std::vector<TableOp>& op_table();

// Throws std::invalid_argument when there is no such op.
const TableOp& op_of_id(int64_t id);

// Throws std::invalid_argument with the op's name and signature, and why a call of it is refused.
[[noreturn]] void refuse(const TableOp& op, const std::string& why);

}  // namespace quire
