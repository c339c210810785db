// SPDX-License-Identifier: Apache-2.0

package cache

import "rblk/volume"

// numEvents is room for one of each kind; a reader that is slower loses the
// oldest, whose news the newer ones carry in their Geometry.
const numEvents = 8

// Events passes on the events of the Source, after the cache has acted on them.
// One reader. Closed after Close.
func (v *Volume) Events() <-chan volume.Event { return v.events }

// watch acts on the Source's events until it is closed.
func (v *Volume) watch() {
	defer v.work.Done()
	defer close(v.events)
	for {
		select {
		case <-v.quit:
			return
		case e, ok := <-v.src.Events():
			if !ok {
				return
			}
			v.act(e)
			v.pass(e)
		}
	}
}

func (v *Volume) act(e volume.Event) {
	all := func(int64) bool { return true }
	switch e.Kind {
	case volume.EventResized, volume.EventGeneration:
		// Blocks know up to where they were inside the volume (block.limit);
		// those beyond the end go.
		v.size.Store(e.Geometry.Size)
		v.drop(true, func(num int64) bool { return num*blockSize >= e.Geometry.Size })
	case volume.EventInstance:
		v.drop(true, all)
		v.log.Warn("content of the export was lost; the cache is empty", "export", e.Geometry.Export, "instance", e.Geometry.Instance)
	}
}

func (v *Volume) pass(e volume.Event) {
	for {
		select {
		case v.events <- e:
			return
		default:
		}
		select {
		case <-v.events:
		default:
		}
	}
}
