// How ranks that share memory wait for each other, and what they say beside their collectives.
#include "comm.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "registry.h"

namespace quire {
namespace {

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

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1000000;
}

constexpr int64_t kNap = 100;  // milliseconds after which a sleeper looks whether all ranks are there

// Rank 0 says `bytes` bytes to all others, which have heard what it said before.
void tell(Comm* comm, const char* data, int64_t bytes) {
    if (bytes < 0 || bytes > comm->message_bytes) fail("tell: the message is longer than there is room for");
    for (int64_t rank = 1; rank < comm->world; ++rank)
        wait_for(*comm, comm->shared->heard[rank], static_cast<uint32_t>(comm->messages));
    std::memcpy(comm->message, data, static_cast<size_t>(bytes));
    comm->shared->size.value.store(static_cast<uint32_t>(bytes));
    announce(*comm, comm->shared->told, static_cast<uint32_t>(++comm->messages));
}

// The next message into `out`, which has room for any; its size into `size`, or -1 after so many milliseconds.
void hear(Comm* comm, char* out, int64_t* size, int64_t milliseconds) {
    *size = -1;
    if (!wait_for(*comm, comm->shared->told, static_cast<uint32_t>(comm->messages + 1), milliseconds)) return;
    ++comm->messages;
    *size = comm->shared->size.value.load();
    std::memcpy(out, comm->message, static_cast<size_t>(*size));
    announce(*comm, comm->shared->heard[comm->rank], static_cast<uint32_t>(comm->messages));
}

// This rank says `bytes` bytes to rank 0.
void say(Comm* comm, const char* data, int64_t bytes) {
    if (bytes < 0 || bytes > Ring::kBytes) fail("say: the message is longer than there is room for");
    put(*comm, ring(*comm, comm->rank, comm->rank), data, bytes);
}

// What `rank` says next into `out`, which has room for any; its size into `size`, or -1 after so many milliseconds, 0: at once.
void listen(Comm* comm, int64_t rank, char* out, int64_t* size, int64_t milliseconds) {
    Ring& from = ring(*comm, rank, rank);
    const uint32_t taken = from.taken.value.load();
    *size = -1;
    if (!reached(from.sent, taken + 1) && (!milliseconds || !wait_for(*comm, from.sent, taken + 1, milliseconds))) return;
    const Ring::Piece& piece = from.pieces[taken % Ring::kPieces];
    *size = std::clamp<int64_t>(piece.total, 0, Ring::kBytes);
    std::memcpy(out, piece.data, static_cast<size_t>(*size));
    announce(*comm, from.taken, taken + 1);
}

void leave(Comm* comm) { comm->left->value.store(1); }

const OpEntry kOps[] = {op_entry<&tell>("tell"), op_entry<&hear>("hear"), op_entry<&say>("say"), op_entry<&listen>("listen"),
                        op_entry<&leave>("leave")};
const Register kRegister(kOps);

}  // namespace

void announce(Comm& comm, Word& word, uint32_t count) {
    word.value.store(count);
#ifdef __linux__
    if (comm.shared->sleepers.value.load()) syscall(SYS_futex, &word.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    static_cast<void>(comm);
#endif
}

bool wait_for(Comm& comm, Word& word, uint32_t count, int64_t milliseconds) {
    const auto behind = [&](uint32_t seen) {
        if (comm.left->value.load(std::memory_order_relaxed)) fail("a rank of the group has ended");
        return static_cast<int32_t>(seen - count) < 0;
    };
    for (int64_t i = 0; i < comm.spins; ++i) {
        if (!behind(word.value.load(std::memory_order_acquire))) return true;
        pause();
    }
    const int64_t begin = now();
    for (;;) {
        const int64_t left = milliseconds ? milliseconds - (now() - begin) : kNap;
        comm.shared->sleepers.value.fetch_add(1);
        const uint32_t seen = word.value.load();
        if (static_cast<int32_t>(seen - count) < 0 && left > 0) sleep_while(word, seen, std::min(left, kNap));
        comm.shared->sleepers.value.fetch_sub(1);
        if (!behind(word.value.load())) return true;
        if (milliseconds && left <= 0) return false;
        if (!milliseconds && comm.patience && now() - begin > comm.patience) {
            leave(&comm);
            fail("a rank of the group has not come in time");
        }
    }
}

void put(Comm& comm, Ring& ring, const char* data, int64_t bytes) {
    int64_t begin = 0;
    do {
        const uint32_t sent = ring.sent.value.load(std::memory_order_relaxed);
        wait_for(comm, ring.taken, sent + 1 - static_cast<uint32_t>(Ring::kPieces));
        Ring::Piece& piece = ring.pieces[sent % Ring::kPieces];
        const int64_t n = std::min(Ring::kBytes, bytes - begin);
        piece.total = bytes;
        if (n) std::memcpy(piece.data, data + begin, static_cast<size_t>(n));
        announce(comm, ring.sent, sent + 1);
        begin += n;
    } while (begin < bytes);
}

}  // namespace quire
