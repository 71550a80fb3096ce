#include "op_table.h"

#include <cstring>
#include <stdexcept>

#include "isa.h"

namespace quire {
namespace {

// Filled by static objects (`Register`) before the table is first asked for.
std::vector<OpEntry>& ops_that_exist_once() {
    static std::vector<OpEntry> entries;
    return entries;
}

void add(std::vector<TableOp>& table, const char* unit, const OpEntry* entries, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const auto arguments = static_cast<int64_t>(std::strlen(entries[i].signature));
        table.push_back({unit, entries[i].name, entries[i].signature, arguments, entries[i].call});
    }
}

}  // namespace

const std::vector<TableOp>& op_table() {
    static const std::vector<TableOp> table = [] {
        std::vector<TableOp> all;
        add(all, "", ops_that_exist_once().data(), ops_that_exist_once().size());
        for (const Unit& unit : supported_units())
            for (const OpList* const* list = unit.ops; *list; ++list) add(all, unit.name, (*list)->ops, (*list)->count);
        return all;
    }();
    return table;
}

const TableOp& op_of_id(int64_t id) {
    const std::vector<TableOp>& table = op_table();
    if (id < 0 || static_cast<size_t>(id) >= table.size()) throw std::invalid_argument("unknown op id " + std::to_string(id));
    return table[static_cast<size_t>(id)];
}

void refuse(const TableOp& op, const std::string& why) {
    const std::string unit = *op.unit ? std::string(op.unit) + "/" : "";
    throw std::invalid_argument("op " + unit + op.name + "(" + op.signature + "): " + why);
}

void fail(const char* message) { throw std::invalid_argument(message); }

Register::Register(const OpEntry* entries, size_t count) {
    ops_that_exist_once().insert(ops_that_exist_once().end(), entries, entries + count);
}

}  // namespace quire
