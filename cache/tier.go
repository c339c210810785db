// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/cespare/xxhash/v2"
)

// The tier keeps blocks of one layout on a local disk, across restarts. A
// directory of cache-dir belongs to one layout (its name is the layout's hash)
// and holds two files of equally many slots: "data", a block of 64 KiB each, and
// "index", a record each:
//
//	 0  block number + 1; 0: the slot is empty
//	 8  pages that are there, in the low 16 bits
//	16  xxhash64 of each page (16 × 8 bytes)
//	144 xxhash64 of the bytes before, seeded by the layout
//
// All integers are little-endian. Nothing is synced: whatever a crash leaves, a
// page is used only if its record and its own checksum say that it is whole.
// Before a slot is used anew its record is emptied.
const (
	recordSize = 152
	sumsAt     = 16
	sealAt     = 144
	// slotSize is what a slot takes of the cap.
	slotSize = blockSize + recordSize
	// admitOne of so many blocks takes another's slot once all are taken. A tier
	// that is smaller than its dataset is read in epochs: whatever replaces at
	// every miss has then thrown out each block just before its turn. Keeping
	// most serves tier/dataset of each epoch, and a change of what is read is
	// still followed within some rounds.
	admitOne = 16
)

// TierStats counts what the tier on local disk did. Corrupt and Errors were
// made good by fetching from the target.
type TierStats struct {
	HitBytes, WrittenBytes, Corrupt, Errors uint64
	Bytes                                   int64 // held
}

type tier struct {
	log         *slog.Logger
	seed        uint64
	data, index *os.File
	lock        *os.File
	slots       int64 // at most

	mu     sync.Mutex
	at     map[int64]int64 // block → slot
	owner  []int64         // slot → block + 1
	masks  []uint16        // slot → pages
	used   []bool          // slot → read since the hand came by
	hand   int64           // of the clock, when all slots are taken
	full   bool            // the disk is: no new slots
	lacked uint64          // blocks that found all slots taken

	failed atomic.Bool // the tier is given up

	hits, written, corrupt, errs atomic.Uint64
}

// openTier opens the tier of a layout below dir with at most limit bytes. Other
// layouts that are not in use make room for it.
func openTier(dir, layout string, limit int64, log *slog.Logger) (*tier, error) {
	seed := xxhash.Sum64String(layout)
	home := filepath.Join(dir, fmt.Sprintf("%016x", seed))
	if err := os.MkdirAll(home, 0o700); err != nil {
		return nil, fmt.Errorf("cache-dir: %w", err)
	}
	t := &tier{log: log, seed: seed, at: map[int64]int64{}}
	if err := t.open(home); err != nil {
		t.closeFiles()
		return nil, fmt.Errorf("cache-dir: %w", err)
	}
	others, err := clearOthers(dir, home, limit)
	if err != nil {
		t.closeFiles()
		return nil, fmt.Errorf("cache-dir: %w", err)
	}
	if t.slots = (limit - others) / slotSize; t.slots < 1 {
		t.closeFiles()
		return nil, fmt.Errorf("cache-disk of %d bytes leaves no room in %s (%d bytes are in use by other mounts)", limit, dir, others)
	}
	if err := t.load(); err != nil {
		t.closeFiles()
		return nil, fmt.Errorf("cache-dir: %w", err)
	}
	return t, nil
}

func (t *tier) open(home string) (err error) {
	const flags = os.O_RDWR | os.O_CREATE
	if t.lock, err = os.OpenFile(filepath.Join(home, "lock"), flags, 0o600); err != nil {
		return err
	}
	if err = lockFile(t.lock); err != nil {
		return fmt.Errorf("%s is in use by another process; give this one a cache-dir of its own: %w", home, err)
	}
	if t.data, err = os.OpenFile(filepath.Join(home, "data"), flags, 0o600); err != nil {
		return err
	}
	t.index, err = os.OpenFile(filepath.Join(home, "index"), flags, 0o600)
	return err
}

func (t *tier) closeFiles() {
	for _, f := range []*os.File{t.data, t.index, t.lock} {
		if f != nil {
			f.Close()
		}
	}
}

// clearOthers removes the layouts below dir that no process uses if all
// together take more than half of limit, and returns the bytes of those that
// remain. Half, so that a dataset's last version helps while the new one fills.
func clearOthers(dir, home string, limit int64) (int64, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	sum := int64(0)
	for _, e := range entries {
		other := filepath.Join(dir, e.Name())
		if len(e.Name()) != 16 || !e.IsDir() || other == home {
			continue
		}
		size := dirSize(other)
		if sum+size > limit/2 && removeIfUnused(other) {
			continue
		}
		sum += size
	}
	return sum, nil
}

func dirSize(dir string) (sum int64) {
	for _, name := range []string{"data", "index"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err == nil {
			sum += st.Size()
		}
	}
	return sum
}

func removeIfUnused(dir string) bool {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return false
	}
	defer f.Close()
	return lockFile(f) == nil && os.RemoveAll(dir) == nil
}

// load reads the index, and cuts the files to the cap.
func (t *tier) load() error {
	if err := t.index.Truncate(min(fileSize(t.index), t.slots*recordSize)); err != nil {
		return err
	}
	if err := t.data.Truncate(min(fileSize(t.data), t.slots*blockSize)); err != nil {
		return err
	}
	n := fileSize(t.index) / recordSize
	const batch = 1024
	buf := make([]byte, batch*recordSize)
	for slot := int64(0); slot < n; {
		k := min(n-slot, batch)
		if _, err := t.index.ReadAt(buf[:k*recordSize], slot*recordSize); err != nil {
			return err
		}
		for i := range k {
			num, mask, ok := t.parse(buf[i*recordSize:][:recordSize])
			if _, twice := t.at[num]; !ok || twice {
				num, mask = -1, 0
			} else {
				t.at[num] = slot + i
			}
			t.owner = append(t.owner, num+1)
			t.masks = append(t.masks, mask)
			t.used = append(t.used, false)
		}
		slot += k
	}
	return nil
}

func fileSize(f *os.File) int64 {
	st, err := f.Stat()
	if err != nil {
		return 0
	}
	return st.Size()
}

// parse reads a record.
func (t *tier) parse(rec []byte) (num int64, mask uint16, ok bool) {
	if binary.LittleEndian.Uint64(rec[sealAt:]) != t.seal(rec) {
		return 0, 0, false
	}
	num = int64(binary.LittleEndian.Uint64(rec)) - 1
	return num, uint16(binary.LittleEndian.Uint64(rec[8:])), num >= 0
}

func (t *tier) seal(rec []byte) uint64 { return xxhash.Sum64(rec[:sealAt]) ^ t.seed }

// has is the pages of mask that the tier holds of block num.
func (t *tier) has(num int64, mask uint16) uint16 {
	if t == nil || t.failed.Load() {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	slot, ok := t.at[num]
	if !ok {
		return 0
	}
	return t.masks[slot] & mask
}

// hasAny is whether the tier holds a page of the claims.
func (t *tier) hasAny(claims []segment) bool {
	for _, c := range claims {
		if t.has(c.b.num, c.mask) != 0 {
			return true
		}
	}
	return false
}

// read fills the pages of mask of block num, each into page(i), and returns
// those that it could. What is damaged is forgotten.
func (t *tier) read(num int64, mask uint16, page func(i int) []byte) uint16 {
	t.mu.Lock()
	slot, ok := t.at[num]
	if ok {
		mask &= t.masks[slot]
		t.used[slot] = true
	}
	t.mu.Unlock()
	if !ok || mask == 0 {
		return 0
	}
	var rec [recordSize]byte
	if _, err := t.index.ReadAt(rec[:], slot*recordSize); err != nil {
		t.forget(num, slot, err)
		return 0
	}
	// The record names its block, so a slot that was used anew meanwhile is seen.
	if n, _, ok := t.parse(rec[:]); !ok || n != num {
		t.forget(num, slot, nil)
		return 0
	}
	var got uint16
	for m := mask; m != 0; m &= m - 1 {
		i := bits.TrailingZeros16(m)
		p := page(i)
		if _, err := t.data.ReadAt(p, slot*blockSize+int64(i)*pageSize); err != nil {
			t.forget(num, slot, err)
			break
		}
		if xxhash.Sum64(p) != binary.LittleEndian.Uint64(rec[sumsAt+8*i:]) {
			t.forget(num, slot, nil)
			break
		}
		got |= 1 << i
	}
	t.hits.Add(uint64(bits.OnesCount16(got)) * pageSize)
	return got
}

// forget drops a damaged block; err is the disk's, nil a wrong checksum. A
// block that has moved since was not damaged, only raced with.
func (t *tier) forget(num, slot int64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s, ok := t.at[num]; !ok || s != slot {
		return
	}
	delete(t.at, num)
	t.owner[slot], t.masks[slot] = 0, 0
	if err != nil {
		t.errs.Add(1)
		t.log.Warn("the local cache cannot be read; the target serves instead", "block", num, "err", err)
		return
	}
	t.corrupt.Add(1)
	t.log.Warn("a block of the local cache is damaged; it is fetched again", "block", num)
}

// write puts pages of a block into its slot, or into another one.
func (t *tier) write(num int64, mask uint16, page func(i int) []byte) {
	if t.failed.Load() {
		return
	}
	if err := t.put(num, mask, page); err != nil {
		t.errs.Add(1)
		t.log.Warn("the local cache cannot be written", "err", err)
	}
}

func (t *tier) put(num int64, mask uint16, page func(i int) []byte) error {
	var rec [recordSize]byte
	slot, have, fresh := t.place(num)
	if slot < 0 {
		return nil
	}
	if fresh {
		// The old record goes first: never does one name another's data.
		if _, err := t.index.WriteAt(rec[:], slot*recordSize); err != nil {
			return t.refused(slot, err)
		}
	} else if _, err := t.index.ReadAt(rec[:], slot*recordSize); err != nil {
		return t.refused(slot, err)
	} else if n, _, ok := t.parse(rec[:]); !ok || n != num {
		rec, have = [recordSize]byte{}, 0
	}
	for m := mask; m != 0; m &= m - 1 {
		i := bits.TrailingZeros16(m)
		p := page(i)
		if _, err := t.data.WriteAt(p, slot*blockSize+int64(i)*pageSize); err != nil {
			return t.refused(slot, err)
		}
		binary.LittleEndian.PutUint64(rec[sumsAt+8*i:], xxhash.Sum64(p))
	}
	binary.LittleEndian.PutUint64(rec[0:], uint64(num+1))
	binary.LittleEndian.PutUint64(rec[8:], uint64(have|mask))
	binary.LittleEndian.PutUint64(rec[sealAt:], t.seal(rec[:]))
	if _, err := t.index.WriteAt(rec[:], slot*recordSize); err != nil {
		return t.refused(slot, err)
	}
	t.written.Add(uint64(bits.OnesCount16(mask)) * pageSize)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.at[num] = slot
	t.owner[slot], t.masks[slot] = num+1, have|mask
	return nil
}

// place finds the block's slot, or empties one for it: a new one while the cap
// and the disk allow, else the first that was not read since the clock's last
// round. slot is -1 when there is none.
func (t *tier) place(num int64) (slot int64, have uint16, fresh bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s, ok := t.at[num]; ok {
		return s, t.masks[s], false
	}
	n := int64(len(t.owner))
	if n < t.slots && !t.full {
		t.owner, t.masks, t.used = append(t.owner, 0), append(t.masks, 0), append(t.used, false)
		return n, 0, true
	}
	if t.lacked++; n == 0 || t.lacked%admitOne != 0 {
		return -1, 0, false
	}
	for range 2 * n {
		t.hand = (t.hand + 1) % n
		if !t.used[t.hand] {
			break
		}
		t.used[t.hand] = false
	}
	if old := t.owner[t.hand]; old != 0 {
		delete(t.at, old-1)
	}
	t.owner[t.hand], t.masks[t.hand] = 0, 0
	return t.hand, 0, true
}

// refused is a failed write: the slot is empty, and when the disk is full the
// tier grows no more.
func (t *tier) refused(slot int64, err error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if old := t.owner[slot]; old != 0 {
		delete(t.at, old-1)
	}
	t.owner[slot], t.masks[slot] = 0, 0
	if isFull(err) {
		if slot == int64(len(t.owner))-1 {
			t.owner, t.masks, t.used = t.owner[:slot], t.masks[:slot], t.used[:slot]
		}
		if t.full {
			return nil // told already
		}
		t.full = true
		return fmt.Errorf("the disk is full, the local cache stays at %d blocks: %w", len(t.owner), err)
	}
	if errors.Is(err, os.ErrClosed) {
		return err
	}
	t.failed.Store(true)
	return fmt.Errorf("the local cache is given up until the next mount: %w", err)
}

func (t *tier) stats() TierStats {
	if t == nil {
		return TierStats{}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return TierStats{
		HitBytes: t.hits.Load(), WrittenBytes: t.written.Load(), Corrupt: t.corrupt.Load(), Errors: t.errs.Load(),
		Bytes: int64(len(t.owner)) * slotSize,
	}
}
