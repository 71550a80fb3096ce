// A pool that spins briefly between parallel regions, then yields its core to whoever wants it, and parks on a futex after that.
//
// Every thread owns a contiguous range of the indices (so it streams neighbouring memory) and helps with the other ranges
// when its own is done: a core that the machine took away for a moment does not hold up the step. Ranges are claimed one
// index at a time through a cursor that carries the region's number, so a late thread can never run a stale task.
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "registry.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

// About 15 us on current cores: longer than the gap between two ops of a recorded step, shorter than a torch call.
constexpr int kSpins = 400;
// About half a millisecond, longer than what Python does between two steps: a worker that parks there joins the next step
// 70 us late. Awake, one stream at 4 bits was 3 % faster (0.6 B and 1 B). Whoever else wants the core gets it.
constexpr int kYields = 1000;
constexpr int kIndexBits = 24;
constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

struct alignas(64) Range {
    std::atomic<uint64_t> cursor{0};  // region number << kIndexBits | next index
    std::atomic<uint64_t> end{0};
};

thread_local bool t_in_task = false;

struct InTask {
    InTask() { t_in_task = true; }
    ~InTask() { t_in_task = false; }
};

class Pool {
   public:
    Pool(int threads, bool pin) : threads_(threads), ranges_(new Range[static_cast<size_t>(threads)]) {
        for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t, pin] { work(t, pin); });
        while (begun_.load() < threads - 1) sched_yield();
    }

    ~Pool() {
        stop_.store(true);
        region_.fetch_add(1);
        region_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    int threads() const { return threads_; }

    // On the first `most` threads, or all where there are fewer.
    void run(int64_t count, Task task, void* context, int most) {
        const int active = most < threads_ ? most : threads_;
        active_.store(active, std::memory_order_relaxed);
        task_ = task;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        const uint64_t region = (region_.load(std::memory_order_relaxed) + 1) & (~uint64_t{0} >> kIndexBits);
        for (int t = 0; t < active; ++t) {
            auto& range = ranges_[static_cast<size_t>(t)];
            // Close the range first: a late thread that pairs the old cursor with the new end must fail to claim.
            range.cursor.store(region << kIndexBits | kIndexMask, std::memory_order_relaxed);
            range.end.store(static_cast<uint64_t>(count * (t + 1) / active), std::memory_order_release);
            const auto begin = static_cast<uint64_t>(count * t / active);
            range.cursor.store(region << kIndexBits | begin, std::memory_order_release);
        }
        region_.store(region);
        if (parked_.load() > 0) region_.notify_all();
        take(0, region);
        for (int spin = 0; done_.load(std::memory_order_acquire) < count; ++spin) {
            if (spin < kSpins) {
                relax();
            } else {
                sched_yield();
            }
        }
    }

   private:
    // Runs what is left of thread `t`'s range, then of the others'.
    void take(int t, uint64_t region) {
        // Of a later region than `region` only where that has ended, so that nothing of it is left to claim.
        const int active = active_.load(std::memory_order_relaxed);
        if (t >= active) return;
        const InTask in_task;
        int64_t finished = 0;
        for (int offset = 0; offset < active; ++offset) {
            auto& range = ranges_[static_cast<size_t>((t + offset) % active)];
            uint64_t seen = range.cursor.load(std::memory_order_acquire);
            while (seen >> kIndexBits == region && (seen & kIndexMask) < range.end.load(std::memory_order_acquire)) {
                if (!range.cursor.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
                task_(context_, static_cast<int64_t>(seen & kIndexMask), t);  // claimed: the region cannot end before
                ++finished;
                seen = range.cursor.load(std::memory_order_acquire);
            }
        }
        if (finished) done_.fetch_add(finished, std::memory_order_acq_rel);
    }

    void work(int t, bool pin) {
        if (pin) pin_to(t);
        // The system allocates a thread's part of thread-local data at its first use, and ends the process where it has
        // no memory then: it is used once before there is a pool.
        { const InTask first_use; }
        begun_.fetch_add(1);
        uint64_t seen = 0;
        while (true) {
            uint64_t region = region_.load(std::memory_order_acquire);
            for (int spin = 0; region == seen && spin < kSpins; ++spin) {
                relax();
                region = region_.load(std::memory_order_acquire);
            }
            for (int yields = 0; region == seen && yields < kYields; ++yields) {
                sched_yield();
                region = region_.load(std::memory_order_acquire);
            }
            if (region == seen) {
                parked_.fetch_add(1);
                region_.wait(seen);
                parked_.fetch_sub(1);
                continue;
            }
            if (stop_.load()) return;
            seen = region;
            take(t, region);
        }
    }

    // Linux only: macOS has no affinity, threads run where it puts them.
    static void pin_to([[maybe_unused]] int t) {
#if defined(__linux__)
        cpu_set_t all, one;
        if (sched_getaffinity(0, sizeof all, &all) != 0) return;
        int nth = 0;
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (!CPU_ISSET(cpu, &all) || nth++ != t) continue;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof one, &one);
            return;
        }
#endif
    }

    const int threads_;
    std::unique_ptr<Range[]> ranges_;
    Task task_ = nullptr;
    void* context_ = nullptr;
    std::atomic<int> active_{0};
    alignas(64) std::atomic<uint64_t> region_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    std::atomic<int> parked_{0};
    std::atomic<int> begun_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

std::mutex g_mutex;
std::unique_ptr<Pool> g_pool;
std::atomic<int> g_threads{0};
bool g_pin = false;
thread_local int t_threads = 0;  // what `SameThreads` keeps; 0: there is none

int affinity_count() {
#if defined(__linux__)
    cpu_set_t set;
    const int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
#else
    const int count = static_cast<int>(std::thread::hardware_concurrency());
#endif
    return count < 1 ? 1 : count;
}

// Threads do not survive a fork: the child forgets the pool and makes its own at the first region.
void forget_pool() {
    (void)g_pool.release();
    new (&g_mutex) std::mutex;
}

[[maybe_unused]] const int g_fork_handler = pthread_atfork(nullptr, nullptr, forget_pool);

struct Area {
    void* data = nullptr;
    size_t size = 0;
    ~Area() { std::free(data); }
};

}  // namespace

int thread_count() {
    if (t_threads) return t_threads;
    if (const int threads = g_threads.load()) return threads;
    int none = 0;
    const int all = affinity_count();
    return g_threads.compare_exchange_strong(none, all) ? all : none;
}

SameThreads::SameThreads() : before_(t_threads) { t_threads = thread_count(); }

SameThreads::~SameThreads() { t_threads = before_; }

void set_thread_count(int threads, bool pin) {
    if (threads < 0 || threads > 1024) fail("threads must lie in [0, 1024]");
    const std::lock_guard<std::mutex> lock(g_mutex);
    const int wanted = threads == 0 ? affinity_count() : threads;
    if (g_pool && (g_pool->threads() != wanted || g_pin != pin)) g_pool.reset();
    g_threads = wanted;
    g_pin = pin;
}

void parallel_tasks(int64_t count, Task task, void* context) {
    if (count <= 0) return;
    const int most = thread_count();
    if (count == 1 || most == 1) {
        const InTask in_task;
        for (int64_t i = 0; i < count; ++i) task(context, i, 0);
        return;
    }
    const std::lock_guard<std::mutex> lock(g_mutex);
    if (!g_pool) g_pool = std::make_unique<Pool>(g_threads, g_pin);
    constexpr auto kMost = static_cast<int64_t>(kIndexMask);
    for (int64_t begin = 0; begin < count; begin += kMost) {
        struct Shifted {
            Task task;
            void* context;
            int64_t begin;
        } shifted{task, context, begin};
        const int64_t part = count - begin < kMost ? count - begin : kMost;
        g_pool->run(
            part,
            [](void* c, int64_t i, int t) {
                const auto* s = static_cast<const Shifted*>(c);
                s->task(s->context, s->begin + i, t);
            },
            &shifted, most);
    }
}

void advise_huge(void* address, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(address) + page - 1) / page * page;
    const auto end = (reinterpret_cast<uintptr_t>(address) + bytes) / page * page;
    if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

void* scratch(Scratch use, size_t bytes) {
    if (t_in_task) fail("scratch: a task asks for memory");
    thread_local Area areas[static_cast<size_t>(Scratch::kCount)];
    Area& area = areas[static_cast<size_t>(use)];
    if (area.size >= bytes && area.data) return area.data;
    constexpr size_t kHuge = size_t{2} << 20;
    size_t size = bytes + bytes / 4 + 4096;
    const size_t align = size >= kHuge ? kHuge : 64;
    size = (size + align - 1) / align * align;
    std::free(area.data);
    area.data = std::aligned_alloc(align, size);
    area.size = area.data ? size : 0;
    if (!area.data) throw std::bad_alloc();
    if (align == kHuge) advise_huge(area.data, size);
    return area.data;
}

}  // namespace quire
