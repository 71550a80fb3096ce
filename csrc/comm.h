// Memory that the ranks of one host share, and how they wait for each other. What they exchange over it is in
// collectives.cpp, what they say in comm.cpp; src/quire/parallel/shared.py maps it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int64_t kRanks = 64;

struct alignas(64) Word {
    std::atomic<uint32_t> value;
};
static_assert(sizeof(Word) == 64 && std::atomic<uint32_t>::is_always_lock_free);

// The beginning of the shared memory; zeros at first. Behind it lie the message, then the slots, two of each rank, then the rings.
struct Header {
    Word arrived[kRanks];  // collectives that the rank has written its part of
    Word heard[kRanks];    // messages that it has read
    Word told;             // messages from rank 0
    Word sleepers;         // who must be woken
    Word size;             // bytes of the message
    Word left;             // what `Comm::left` points to
};

// What one rank sends to another, in pieces; only the sender writes `sent` and only the receiver `taken`.
struct Ring {
    static constexpr int64_t kPieces = 16, kBytes = 256 << 10;
    struct alignas(64) Piece {
        int64_t total;  // bytes of all that this piece is a part of
        alignas(64) char data[kBytes];
    };
    Word sent, taken;
    Piece pieces[kPieces];
};
static_assert(sizeof(Ring) == 128 + 16 * (64 + (256 << 10)), "RING of src/quire/parallel/shared.py");

// One rank's view; src/quire/parallel/shared.py fills it in.
struct Comm {
    Header* shared;
    char* message;
    char* slots;
    Ring* rings;  // [from][to]; the one from a rank to itself holds what it says to rank 0
    Word* left;   // not 0: a rank has ended; of the header, or of that of all ranks where this is some of them
    int64_t rank, world, slot_bytes, message_bytes;
    int64_t spins;     // looks before a rank sleeps: where each has a core of its own, waking would cost more
    int64_t patience;  // milliseconds that a rank waits for another before the group ends, 0: for ever
    int64_t collectives, messages;
    int64_t waited;  // nanoseconds in `recv` until something was there
};

// `word` becomes `count`, and who sleeps looks at it.
void announce(Comm& comm, Word& word, uint32_t count);

// Until `word` has reached `count`, or for so many milliseconds, 0: as long as the rank is patient. Whether it has. Throws when
// a rank has ended, and ends the group when its patience is over.
bool wait_for(Comm& comm, Word& word, uint32_t count, int64_t milliseconds = 0);

inline bool reached(const Word& word, uint32_t count) {
    return static_cast<int32_t>(word.value.load(std::memory_order_acquire) - count) >= 0;
}

inline Ring& ring(const Comm& comm, int64_t from, int64_t to) { return comm.rings[from * comm.world + to]; }

// `bytes` bytes into the ring, in one piece at least; waits while it is full.
void put(Comm& comm, Ring& ring, const char* data, int64_t bytes);

}  // namespace quire
