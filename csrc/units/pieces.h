// Hands out 64-byte aligned pieces of a buffer; with a null base it only counts.
#pragma once

#include "unit.h"

namespace quire::QUIRE_UNIT {
namespace {

struct Pieces {
    char* base;
    int64_t used = 0;
    template <class T>
    T* take(int64_t count) {
        char* p = base ? base + used : nullptr;
        used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(p);
    }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
