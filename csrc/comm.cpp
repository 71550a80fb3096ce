// Collectives of processes on one host that share memory. What they do is said in src/quire/parallel/comm.py.
//
// Every rank has two slots that take turns. A collective writes the own part into a slot, says so, waits for all others
// and reads their slots. A slot is written again two collectives later, when each rank has said that it wrote the one
// between, hence has read this one: one wait a collective is enough. Parts are added in the order of ranks.
#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

constexpr int64_t kRanks = 64;
constexpr int64_t kPiece = 128 << 10;  // bytes a rank exchanges at once: they stay in its second level of caches

struct alignas(64) Word {
    std::atomic<uint32_t> value;
};
static_assert(sizeof(Word) == 64 && std::atomic<uint32_t>::is_always_lock_free);

// The beginning of the shared memory; zeros at first. Behind it lie the message, then the slots, two of each rank.
struct Header {
    Word arrived[kRanks];  // collectives that the rank has written its part of
    Word heard[kRanks];    // messages that it has read
    Word told;             // messages from rank 0
    Word sleepers;         // who must be woken
    Word size;             // bytes of the message
    Word left;             // not 0: a rank has ended
};

// One rank's view; src/quire/parallel/shared.py fills it in.
struct Comm {
    Header* shared;
    char* message;
    char* slots;
    int64_t rank, world, slot_bytes, message_bytes;
    int64_t spins;  // looks before a rank sleeps: where each has a core of its own, waking would cost more
    int64_t collectives, messages;
};

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(Word& word, uint32_t seen, int64_t milliseconds) {
#ifdef __linux__
    const timespec limit{milliseconds / 1000, milliseconds % 1000 * 1000000};
    syscall(SYS_futex, &word.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    sched_yield();
#endif
}

void say(Comm& comm, Word& word, uint32_t count) {
    word.value.store(count);
#ifdef __linux__
    if (comm.shared->sleepers.value.load()) syscall(SYS_futex, &word.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Until `word` has reached `count`, or for so many milliseconds, 0: for ever. Whether it has. Throws when a rank ends.
bool wait_for(Comm& comm, Word& word, uint32_t count, int64_t milliseconds = 0) {
    const auto behind = [&](uint32_t seen) {
        if (comm.shared->left.value.load(std::memory_order_relaxed)) fail("a rank of the group has ended");
        return static_cast<int32_t>(seen - count) < 0;
    };
    for (int64_t i = 0; i < comm.spins; ++i) {
        if (!behind(word.value.load(std::memory_order_acquire))) return true;
        pause();
    }
    for (bool once = false;; once = true) {
        comm.shared->sleepers.value.fetch_add(1);
        const uint32_t seen = word.value.load();
        if (static_cast<int32_t>(seen - count) < 0) sleep_while(word, seen, milliseconds ? milliseconds : 100);
        comm.shared->sleepers.value.fetch_sub(1);
        if (!behind(word.value.load())) return true;
        if (milliseconds && once) return false;
    }
}

char* slot(const Comm& comm, int64_t rank) {
    return comm.slots + (2 * rank + (comm.collectives & 1)) * comm.slot_bytes;
}

void meet(Comm& comm) {
    const auto count = static_cast<uint32_t>(comm.collectives);
    say(comm, comm.shared->arrived[comm.rank], count);
    for (int64_t rank = 0; rank < comm.world; ++rank)
        if (rank != comm.rank) wait_for(comm, comm.shared->arrived[rank], count);
}

const float* part(const Comm& comm, int64_t rank) { return reinterpret_cast<const float*>(slot(comm, rank)); }

void all_reduce(Comm* comm, float* x, int64_t count) {
    const int64_t most = std::min(kPiece, comm->slot_bytes) / static_cast<int64_t>(sizeof(float));
    for (int64_t begin = 0; begin < count; begin += most) {
        const int64_t n = std::min(most, count - begin);
        float* const own = x + begin;
        ++comm->collectives;
        std::memcpy(slot(*comm, comm->rank), own, static_cast<size_t>(n) * sizeof(float));
        meet(*comm);
        const float* const first = part(*comm, 0);
        const float* const second = part(*comm, 1);
        for (int64_t i = 0; i < n; ++i) own[i] = first[i] + second[i];
        for (int64_t rank = 2; rank < comm->world; ++rank) {
            const float* const more = part(*comm, rank);
            for (int64_t i = 0; i < n; ++i) own[i] += more[i];
        }
    }
}

// out [rows, starts[world]]: each rank's x [rows, starts[rank + 1] - starts[rank]] beside each other. Ranks meet for no rows, too.
void gather_columns(Comm* comm, Optional<float> out, Optional<const float> x, const int64_t* starts, int64_t rows) {
    const auto width = [&](int64_t rank) { return starts[rank + 1] - starts[rank]; };
    const int64_t total = starts[comm->world];
    int64_t widest = 1;
    for (int64_t rank = 0; rank < comm->world; ++rank) widest = std::max(widest, width(rank));
    const int64_t fits = comm->slot_bytes / static_cast<int64_t>(sizeof(float));
    const int64_t columns = std::min(widest, fits), most = std::max<int64_t>(1, fits / columns);
    for (int64_t row = 0; row == 0 || row < rows; row += most) {
        const int64_t n = std::min(most, rows - row);
        for (int64_t from = 0; from < widest; from += columns) {
            const auto piece = [&](int64_t rank) { return std::max<int64_t>(0, std::min(columns, width(rank) - from)); };
            ++comm->collectives;
            const int64_t own = piece(comm->rank);
            for (int64_t i = 0; i < n && own; ++i)
                std::memcpy(slot(*comm, comm->rank) + i * own * 4, x.ptr + (row + i) * width(comm->rank) + from, static_cast<size_t>(own) * 4);
            meet(*comm);
            for (int64_t rank = 0; rank < comm->world; ++rank)
                for (int64_t i = 0, w = piece(rank); i < n && w; ++i)
                    std::memcpy(out.ptr + (row + i) * total + starts[rank] + from, part(*comm, rank) + i * w, static_cast<size_t>(w) * 4);
        }
    }
}

// Rank 0 says `bytes` bytes to all others, which have heard what it said before.
void tell(Comm* comm, const char* data, int64_t bytes) {
    if (bytes < 0 || bytes > comm->message_bytes) fail("tell: the message is longer than there is room for");
    for (int64_t rank = 1; rank < comm->world; ++rank)
        wait_for(*comm, comm->shared->heard[rank], static_cast<uint32_t>(comm->messages));
    std::memcpy(comm->message, data, static_cast<size_t>(bytes));
    comm->shared->size.value.store(static_cast<uint32_t>(bytes));
    say(*comm, comm->shared->told, static_cast<uint32_t>(++comm->messages));
}

// The next message into `out`, which has room for any; its size into `size`, or -1 after so many milliseconds.
void hear(Comm* comm, char* out, int64_t* size, int64_t milliseconds) {
    *size = -1;
    if (!wait_for(*comm, comm->shared->told, static_cast<uint32_t>(comm->messages + 1), milliseconds)) return;
    ++comm->messages;
    *size = comm->shared->size.value.load();
    std::memcpy(out, comm->message, static_cast<size_t>(*size));
    say(*comm, comm->shared->heard[comm->rank], static_cast<uint32_t>(comm->messages));
}

// Columns start .. start + d of x [rows, width] as out [rows, d].
void take_columns(float* out, const float* x, int64_t rows, int64_t width, int64_t start, int64_t d) {
    if (start < 0 || start > width - d) fail("take_columns: the row has no such columns");
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) std::memcpy(out + r * d, x + r * width + start, static_cast<size_t>(d) * sizeof(float));
    });
}

void leave(Comm* comm) { comm->shared->left.value.store(1); }

const OpEntry kOps[] = {op_entry<&all_reduce>("all_reduce"), op_entry<&gather_columns>("gather_columns"), op_entry<&tell>("tell"),
                        op_entry<&hear>("hear"), op_entry<&leave>("leave"),
                        op_entry<&take_columns>("take_columns")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
