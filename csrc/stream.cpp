// Weights that are read while steps run: whole layers in turn into a few slots, or experts as routers choose them.
//
// Bytes come from files (a disk's; memory that ranks share is a file, too), or from sockets, whose other end is asked for them. Threads
// that sleep in `pread` keep several requests in flight. What waits is an op like any other, so a recorded step waits where the recorded one would have. Matrices lie in slots that
// never move: a descriptor of a layer names its slot for good, one of experts is moved by `places`, bytes from the pool's first slot.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "registry.h"

namespace quire {
namespace {

struct Segment {
    int64_t part;    // the layer, or the layer whose experts these are
    int64_t file;    // descriptor
    int64_t offset;  // in the file
    int64_t bytes;
    int64_t at;      // in the slot
};

// What is read in pieces. `pending` and `error` are the fetcher's, under its lock.
struct Job {
    int64_t pending = 0;
    int error = 0;
};

// `std::condition_variable` waits by a function that libstdc++ has since 3.4.30 only.
class Condition {
   public:
    ~Condition() { pthread_cond_destroy(&condition_); }
    void notify_all() { pthread_cond_broadcast(&condition_); }
    template <class Done>
    void wait(std::unique_lock<std::mutex>& lock, const Done& done) {
        while (!done()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
    }

   private:
    pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

class Fetcher {
   public:
    Fetcher(int64_t threads, int64_t piece, bool cached) : piece_(piece), cached_(cached) {
        for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    }

    ~Fetcher() {
        {
            std::lock_guard lock(mutex_);
            ends_ = true;
            queue_.clear();
        }
        asked_.notify_all();
        for (std::thread& t : threads_) t.join();
    }

    void ask(Job& job, int64_t file, int64_t offset, int64_t bytes, char* into) {
        {
            std::lock_guard lock(mutex_);
            for (int64_t at = 0; at < bytes; at += piece_) {
                queue_.push_back({&job, static_cast<int>(file), offset + at, std::min(piece_, bytes - at), into + at});
                ++job.pending;
            }
        }
        asked_.notify_all();
    }

    // Until all of it is there; the error of a piece, or 0.
    int wait(Job& job) {
        std::unique_lock lock(mutex_);
        if (job.pending) {
            const auto begin = std::chrono::steady_clock::now();
            done_.wait(lock, [&] { return job.pending == 0; });
            waited_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
        }
        const int error = job.error;
        job.error = 0;
        return error;
    }

    int64_t read() const { return read_.load(); }
    int64_t waited() const { return waited_.load(); }

   private:
    struct Piece {
        Job* job;
        int file;
        int64_t offset, bytes;
        char* into;
    };

    void work() {
        std::unique_lock lock(mutex_);
        while (true) {
            asked_.wait(lock, [&] { return ends_ || !queue_.empty(); });
            if (ends_) return;
            const Piece piece = queue_.front();
            queue_.pop_front();
            lock.unlock();
            const int error = fetch(piece);
            lock.lock();
            if (error) piece.job->error = error;
            if (--piece.job->pending == 0) done_.notify_all();
        }
    }

    std::mutex& turn_at(int socket) {
        std::lock_guard lock(sockets_mutex_);
        return sockets_[socket];
    }

    // One request at a time: offset and bytes as two integers of 64 bits, then the bytes come.
    int ask_socket(const Piece& piece) {
        std::lock_guard turn(turn_at(piece.file));
        const int64_t request[2] = {piece.offset, piece.bytes};
        if (::send(piece.file, request, sizeof request, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof request)) return EPIPE;
        for (int64_t at = 0; at < piece.bytes;) {
            const ssize_t got = ::recv(piece.file, piece.into + at, static_cast<size_t>(piece.bytes - at), 0);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return got < 0 ? errno : EPIPE;  // the other end is gone
            at += got;
        }
        read_ += piece.bytes;
        return 0;
    }

    int fetch(const Piece& piece) {
        for (int64_t at = 0; at < piece.bytes;) {
            const ssize_t got = ::pread(piece.file, piece.into + at, static_cast<size_t>(piece.bytes - at), piece.offset + at);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0 && errno == ESPIPE) return ask_socket(piece);
            if (got <= 0) return got < 0 ? errno : EIO;  // the file ends early
            at += got;
        }
#ifdef POSIX_FADV_DONTNEED
        if (cached_) ::posix_fadvise(piece.file, piece.offset, piece.bytes, POSIX_FADV_DONTNEED);
#endif
        read_ += piece.bytes;
        return 0;
    }

    const int64_t piece_;
    const bool cached_;  // reads go through the system's cache, which is to keep none of it
    std::mutex mutex_;
    Condition asked_, done_;
    std::deque<Piece> queue_;
    bool ends_ = false;
    std::atomic<int64_t> read_{0}, waited_{0};
    std::mutex sockets_mutex_;
    std::map<int, std::mutex> sockets_;
    std::vector<std::thread> threads_;
};

void check_read(int error) {
    if (error) fail(("weights cannot be read while a step runs: " + std::string(std::strerror(error))).c_str());
}

// Layers in turn: layer j lies in slot j % slots. Any order is right; ascending ones, from the first again after the last, are read
// ahead. A slot that is done with asks for the layer that comes next in it.
class Turns {
   public:
    Turns(Fetcher& fetcher, const int64_t* slots, int64_t count, const Segment* segments, int64_t rows, int64_t layers)
        : fetcher_(fetcher), slots_(static_cast<size_t>(count)), segments_(static_cast<size_t>(layers)) {
        for (int64_t s = 0; s < count; ++s) slots_[static_cast<size_t>(s)].memory = reinterpret_cast<char*>(slots[s]);
        for (int64_t i = 0; i < rows; ++i) segments_.at(static_cast<size_t>(segments[i].part)).push_back(segments[i]);
        for (int64_t j = 0; j < std::min(count, layers); ++j) ask(slots_[static_cast<size_t>(j)], j);
    }

    ~Turns() {
        for (Slot& slot : slots_) fetcher_.wait(slot.job);
    }

    void wait(int64_t layer) {
        Slot& slot = slot_of(layer);
        if (slot.layer != layer) {
            fetcher_.wait(slot.job);
            ask(slot, layer);
        }
        const int error = fetcher_.wait(slot.job);
        if (error) slot.layer = -1;
        check_read(error);
    }

    void done(int64_t layer) {
        Slot& slot = slot_of(layer);
        const auto count = static_cast<int64_t>(slots_.size()), layers = static_cast<int64_t>(segments_.size());
        const int64_t next = layer + count < layers ? layer + count : layer % count;
        if (slot.layer == layer && next != layer) ask(slot, next);
    }

   private:
    struct Slot {
        char* memory = nullptr;
        int64_t layer = -1;
        Job job;
    };

    Slot& slot_of(int64_t layer) {
        if (layer < 0 || layer >= static_cast<int64_t>(segments_.size())) fail("stream: there is no such layer");
        return slots_[static_cast<size_t>(layer) % slots_.size()];
    }

    void ask(Slot& slot, int64_t layer) {
        slot.layer = -1;  // until all of it is asked for
        for (const Segment& s : segments_[static_cast<size_t>(layer)]) fetcher_.ask(slot.job, s.file, s.offset, s.bytes, slot.memory + s.at);
        slot.layer = layer;
    }

    Fetcher& fetcher_;
    std::vector<Slot> slots_;
    std::vector<std::vector<Segment>> segments_;
};

// The experts of one layer in the file, one after the other, `stride` bytes each.
struct ExpertFile {
    int64_t file, offset, stride, experts;
    int64_t* places;  // [experts]: bytes from the pool's first slot to the expert's, or -1: not in memory
};

// Experts of all layers in one pool of slots. Who is needed and not there takes the slot of who was chosen least.
class Pool {
   public:
    Pool(Fetcher& fetcher, char* memory, int64_t slot_bytes, int64_t slots, const ExpertFile* files, int64_t layers)
        : fetcher_(fetcher), memory_(memory), slot_bytes_(slot_bytes), owners_(static_cast<size_t>(slots)), files_(files, files + layers) {
        for (const ExpertFile& f : files_) {
            heat_.emplace_back(static_cast<size_t>(f.experts), 0u);
            std::fill(f.places, f.places + f.experts, int64_t{-1});
        }
    }

    ~Pool() { fetcher_.wait(job_); }

    // `offsets` [experts + 1]: pairs before each expert's; those of none are not needed.
    void need(int64_t layer, const int32_t* offsets) {
        if (layer < 0 || layer >= static_cast<int64_t>(files_.size())) fail("stream: there is no such layer");
        const ExpertFile& f = files_[static_cast<size_t>(layer)];
        auto& heat = heat_[static_cast<size_t>(layer)];
        ++now_;
        if (++chosen_ % kAging == 0) age();
        std::vector<int64_t> missing;
        for (int64_t e = 0; e < f.experts; ++e) {
            if (offsets[e + 1] <= offsets[e]) continue;
            heat[static_cast<size_t>(e)] += kOnce;
            ++needed_;
            if (f.places[e] < 0) {
                missing.push_back(e);
            } else {
                owners_[static_cast<size_t>(f.places[e] / slot_bytes_)].used = now_;
            }
        }
        missed_ += static_cast<int64_t>(missing.size());
        try {
            for (const int64_t e : missing) {
                const int64_t slot = take();
                owners_[static_cast<size_t>(slot)] = {layer, e, now_};
                f.places[e] = slot * slot_bytes_;
                fetcher_.ask(job_, f.file, f.offset + e * f.stride, f.stride, memory_ + slot * slot_bytes_);
            }
            check_read(fetcher_.wait(job_));
        } catch (...) {
            fetcher_.wait(job_);  // nothing may be written into a slot that is free
            for (const int64_t e : missing)
                if (f.places[e] >= 0) drop(f.places[e] / slot_bytes_);
            throw;
        }
    }

    int64_t needed() const { return needed_; }
    int64_t missed() const { return missed_; }

   private:
    static constexpr uint32_t kOnce = 1024;
    static constexpr int64_t kAging = 4096;  // choices of layers after which what was chosen counts half

    struct Owner {
        int64_t layer = -1, expert = 0, used = 0;
    };

    void drop(int64_t slot) {
        Owner& owner = owners_[static_cast<size_t>(slot)];
        if (owner.layer >= 0) files_[static_cast<size_t>(owner.layer)].places[owner.expert] = -1;
        owner.layer = -1;
    }

    int64_t take() {
        int64_t best = -1;
        uint32_t least = UINT32_MAX;
        for (size_t s = 0; s < owners_.size(); ++s) {
            const Owner& o = owners_[s];
            if (o.layer < 0) return static_cast<int64_t>(s);
            const uint32_t heat = heat_[static_cast<size_t>(o.layer)][static_cast<size_t>(o.expert)];
            if (o.used != now_ && heat < least) least = heat, best = static_cast<int64_t>(s);
        }
        if (best < 0) fail("stream: a layer needs more experts at once than the pool has room for");
        drop(best);
        return best;
    }

    void age() {
        for (auto& layer : heat_)
            for (uint32_t& heat : layer) heat /= 2;
    }

    Fetcher& fetcher_;
    char* memory_;
    int64_t slot_bytes_, now_ = 0, chosen_ = 0, needed_ = 0, missed_ = 0;
    Job job_;
    std::vector<Owner> owners_;
    std::vector<ExpertFile> files_;
    std::vector<std::vector<uint32_t>> heat_;
};

// A stream serves one walk at a time: that of the thread which runs the steps.
struct Stream {
    explicit Stream(const ReaderDescriptor& by) : fetcher(by.threads, by.piece, by.cached != 0) {}

    Fetcher fetcher;
    std::unique_ptr<Turns> turns;
    std::unique_ptr<Pool> pool;
};

void stream_layers(int64_t* out, const ReaderDescriptor* reader, const int64_t* slots, int64_t count, const Segment* segments, int64_t rows,
                   int64_t layers) {
    if (reader->threads < 1 || reader->piece < 1 || count < 1 || layers < 1) fail("stream: there is nothing to read, or nobody to read it");
    for (int64_t i = 0; i < rows; ++i)
        if (segments[i].part < 0 || segments[i].part >= layers) fail("stream: a segment is of no layer");
    auto made = std::make_unique<Stream>(*reader);
    made->turns = std::make_unique<Turns>(made->fetcher, slots, count, segments, rows, layers);
    *out = reinterpret_cast<int64_t>(made.release());
}

void stream_experts(int64_t* out, const ReaderDescriptor* reader, char* memory, int64_t slot_bytes, int64_t slots, const ExpertFile* files,
                    int64_t layers) {
    if (reader->threads < 1 || reader->piece < 1 || slots < 1 || slot_bytes < 1 || layers < 1) fail("stream: there is nothing to read, or nobody to read it");
    auto made = std::make_unique<Stream>(*reader);
    made->pool = std::make_unique<Pool>(made->fetcher, memory, slot_bytes, slots, files, layers);
    *out = reinterpret_cast<int64_t>(made.release());
}

void stream_wait(Stream* stream, int64_t layer) { stream->turns->wait(layer); }

void stream_done(Stream* stream, int64_t layer) { stream->turns->done(layer); }

void stream_need(Stream* stream, int64_t layer, const int32_t* offsets) { stream->pool->need(layer, offsets); }

// out [4]: bytes read, nanoseconds that steps waited, experts needed, experts that were not in memory.
void stream_counts(const Stream* stream, int64_t* out) {
    out[0] = stream->fetcher.read();
    out[1] = stream->fetcher.waited();
    out[2] = stream->pool ? stream->pool->needed() : 0;
    out[3] = stream->pool ? stream->pool->missed() : 0;
}

void stream_close(Stream* stream) {
    stream->turns.reset();
    stream->pool.reset();
    delete stream;
}

// Rows of a table in a mapped file that were read need not stay in this process's memory: a page that is asked for again comes from the
// system's cache. Linux maps up to 2 MB of that cache for one row of some kilobytes. Only for memory that mirrors a file.
void forget_pages(const char* table, int64_t bytes) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(table), begin = at / page * page;
    (void)madvise(reinterpret_cast<void*>(begin), at + static_cast<uintptr_t>(bytes) - begin, MADV_DONTNEED);
}

const OpEntry kOps[] = {
    op_entry<&stream_layers>("stream_layers"), op_entry<&stream_experts>("stream_experts"), op_entry<&stream_wait>("stream_wait"),
    op_entry<&stream_done>("stream_done"),     op_entry<&stream_need>("stream_need"),       op_entry<&stream_counts>("stream_counts"),
    op_entry<&stream_close>("stream_close"), op_entry<&forget_pages>("forget_pages"),
};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
