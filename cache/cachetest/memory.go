// SPDX-License-Identifier: Apache-2.0

package cachetest

import "unsafe"

// within is whether the non-empty mem lies inside whole.
func within(mem, whole []byte) bool {
	if len(whole) == 0 {
		return false
	}
	lo := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	base := uintptr(unsafe.Pointer(unsafe.SliceData(whole)))
	return lo >= base && lo+uintptr(len(mem)) <= base+uintptr(len(whole))
}
